"""The CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..enums import DistributedType
from .base import Device


class CpuDevice(Device):
    """The CPU: always available, one for all processes of a node."""

    name = "cpu"
    collective_backend = "gloo"
    distributed_type = DistributedType.MULTI_CPU
    caches_memory = False
    # The second is the allocator's message on Windows.
    out_of_memory_messages: ClassVar[tuple[str, ...]] = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
    )

    @property
    def module(self) -> Any:
        return torch.cpu

    def streams(self) -> None:
        """None: those of ``torch.cpu`` do nothing."""

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def set_current(self, device: torch.device) -> None:
        """Do nothing: there is one."""

    def current(self) -> torch.device:
        return torch.device("cpu")

    def chosen(self) -> None:
        """None: there is nothing to choose from."""

    def empty_cache(self) -> None:
        """Do nothing: torch does not cache host memory."""

    def memory_allocated(self, index: int = 0) -> int:
        """Resident set size of this process in bytes: host memory is not counted per tensor."""
        import psutil  # takes longer than the load of a small model, which needs the device but not its memory

        return int(psutil.Process().memory_info().rss)

    def _memory_info(self, index: int) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def is_out_of_memory(self, exception: BaseException) -> bool:
        if isinstance(exception, torch.OutOfMemoryError):
            return False  # of an accelerator
        return isinstance(exception, MemoryError) or super().is_out_of_memory(exception)

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)
