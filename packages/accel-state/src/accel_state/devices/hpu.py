"""Intel Gaudi accelerators, through habana_frameworks: https://docs.habana.ai/en/latest/PyTorch/Reference/Python_Packages.html"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch

from ..enums import DistributedType
from .base import Device, _load_vendor_package


class HpuDevice(Device):
    """Gaudi accelerators: ``habana_frameworks.torch.hpu`` becomes ``torch.hpu``."""

    name = "hpu"
    collective_backend = "hccl"
    visible_devices_variable: ClassVar[str | None] = "HABANA_VISIBLE_MODULES"
    distributed_type = DistributedType.MULTI_HPU
    caches_memory = False
    vendor_package: ClassVar[str | None] = "habana_frameworks"
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("Allocation failed for size", "HPU out of memory")

    def _find_module(self) -> ModuleType | None:
        # The package is a namespace; this submodule adds torch.hpu.
        if super()._find_module() is None and not _load_vendor_package("habana_frameworks"):
            return None
        _load_vendor_package("habana_frameworks.torch.hpu")
        return getattr(torch, "hpu", None)

    def device(self, local_rank: int) -> torch.device:
        """``torch.device("hpu")``: the runtime assigns one accelerator to a process by its local rank."""
        super().device(local_rank)
        return torch.device("hpu")

    def set_current(self, device: torch.device) -> None:
        """Do nothing: the runtime assigns the accelerator."""

    def current(self) -> torch.device:
        return torch.device("hpu")

    def empty_cache(self) -> None:
        """Do nothing: the runtime has no cache that can be released."""
