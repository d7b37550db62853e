"""The GPU of Apple silicon, through Metal Performance Shaders."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..enums import DistributedType
from .base import Device


class MpsDevice(Device):
    """The Apple GPU: one per machine, without collectives."""

    name = "mps"
    # torch.distributed has no Metal backend, so an MPS run has one process; gloo communicates through host memory.
    collective_backend = "gloo"
    distributed_type = DistributedType.NO
    out_of_memory_messages: ClassVar[tuple[str, ...]] = ("MPS backend out of memory",)

    def is_available(self) -> bool:
        return bool(torch.backends.mps.is_built() and torch.backends.mps.is_available())

    def device_count(self) -> int:
        return 1 if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """``torch.device("mps")`` for local rank 0; raises for a second process, which would share the GPU."""
        return torch.device("mps") if local_rank == 0 else super().device(local_rank)

    def set_current(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    def current(self) -> torch.device:
        return torch.device("mps")

    def memory_allocated(self, index: int = 0) -> int:
        return int(torch.mps.current_allocated_memory())

    def _memory_info(self, index: int) -> tuple[int, int]:
        # The memory is shared with the CPU. Beyond the working set that Metal recommends, everything slows down.
        total = int(torch.mps.recommended_max_memory())
        return max(total - int(torch.mps.driver_allocated_memory()), 0), total

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """As in the base class; bfloat16 needs macOS 14."""
        if not super().supports_autocast(dtype):
            return False
        return dtype is not torch.bfloat16 or torch.backends.mps.is_macos_or_newer(14, 0)

    def manual_seed_all(self, seed: int) -> None:
        torch.mps.manual_seed(seed)
