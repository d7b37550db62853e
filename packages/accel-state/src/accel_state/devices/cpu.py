"""The CPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from ..enums import DistributedType
from .base import Device


class CpuDevice(Device):
    """The CPU: always there, one for all processes of a node."""

    name = "cpu"
    collective_backend = "gloo"
    distributed_type = DistributedType.MULTI_CPU
    # The second is what the allocator says on Windows.
    out_of_memory_messages = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

    @property
    def module(self) -> Any:
        """``torch.cpu``."""
        return torch.cpu

    def is_available(self) -> bool:
        """True."""
        return True

    def device_count(self) -> int:
        """1: torch sees all cores as one device."""
        return 1

    def device(self, local_rank: int) -> torch.device:
        """``torch.device("cpu")`` for every local rank."""
        return torch.device("cpu")

    def set_current(self, device: torch.device) -> None:
        """Nothing to choose: there is one CPU device."""

    def current(self) -> torch.device:
        """``torch.device("cpu")``."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for: work on the CPU is done when the call returns."""

    def empty_cache(self) -> None:
        """Nothing to hand back: torch keeps no reserve of host memory."""

    def memory_allocated(self, index: int = 0) -> int:
        """Resident bytes of this process: host memory is not counted by tensor."""
        return int(psutil.Process().memory_info().rss)

    def _memory_info(self, index: int) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def is_out_of_memory(self, exception: BaseException) -> bool:
        """Whether torch's host allocator, numpy or Python ran out of memory."""
        return isinstance(exception, MemoryError) or super().is_out_of_memory(exception)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the CPU generator."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """The state of the CPU generator, a uint8 tensor."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put a state back."""
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """A list of the one state."""
        return [torch.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Put the one state back."""
        (state,) = states
        torch.set_rng_state(state)

    def pci_address(self, index: int) -> str | None:
        """None: a CPU is not on the PCI bus."""
        return None
