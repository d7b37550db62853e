"""TPUs and other devices behind PyTorch/XLA: https://docs.pytorch.org/xla/"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from ..enums import DistributedType
from .base import Device


class XlaDevice(Device):
    """XLA devices. Operations are recorded, and compiled and run by ``torch_xla.sync()``."""

    name = "xla"
    collective_backend = "xla"
    collectives = "xla"
    visible_devices_variable = "TPU_VISIBLE_CHIPS"
    distributed_type = DistributedType.XLA
    vendor_package = "torch_xla"
    autocast_dtypes = (torch.bfloat16,)
    out_of_memory_messages = ("RESOURCE_EXHAUSTED",)

    @property
    def module(self) -> Any:
        """``torch_xla.core.xla_model``, the counterpart of ``torch.<name>`` of other devices."""
        return importlib.import_module("torch_xla.core.xla_model")

    def is_available(self) -> bool:
        """Whether torch_xla is installed and a runtime is selected by PJRT_DEVICE, or by an installed TPU library.

        Asking torch_xla would start the runtime.
        """
        if importlib.util.find_spec("torch_xla") is None:
            return False
        return bool(os.environ.get("PJRT_DEVICE")) or importlib.util.find_spec("libtpu") is not None

    def device_count(self) -> int:
        """Number of XLA devices that this process can address. Starts the runtime."""
        runtime = importlib.import_module("torch_xla.runtime") if self.is_available() else None
        return 0 if runtime is None else int(runtime.addressable_device_count())

    def device(self, local_rank: int) -> torch.device:
        """The XLA device that the runtime assigned to this process."""
        return self.current()

    def set_current(self, device: torch.device) -> None:
        """Do nothing: the runtime assigns a device to each process."""

    def current(self) -> torch.device:
        device: torch.device = importlib.import_module("torch_xla").device()
        return device

    def synchronize(self) -> None:
        """Compile and run the recorded operations, and wait for them."""
        importlib.import_module("torch_xla").sync()
        self.module.wait_device_ops()

    def empty_cache(self) -> None:
        """Do nothing: XLA plans memory when it compiles."""

    def memory_allocated(self, index: int = 0) -> int:
        """Bytes in use on the device, by all processes that share it."""
        free, total = self._memory_info(index)
        return total - free

    def _memory_info(self, index: int) -> tuple[int, int]:
        info = self.module.get_memory_info(self.current())
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])

    def manual_seed_all(self, seed: int) -> None:
        self.module.set_rng_state(seed)

    def get_rng_state(self) -> torch.Tensor:
        """The state, an integer in XLA, as an int64 tensor with one element."""
        return torch.tensor([int(self.module.get_rng_state())], dtype=torch.int64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(int(state.item()))
