"""The GPU of Apple silicon, through Metal Performance Shaders."""

from __future__ import annotations

import torch

from ..enums import DistributedType
from .base import Device


class MpsDevice(Device):
    """Apple's GPU: one a machine, with no collectives of its own."""

    name = "mps"
    # There is no torch.distributed backend for Metal: a run on it is one process, and gloo moves what is in host
    # memory.
    collective_backend = "gloo"
    distributed_type = DistributedType.NO
    out_of_memory_messages = ("MPS backend out of memory",)

    def is_available(self) -> bool:
        """Whether this is a Mac with a GPU that this torch build can use."""
        return bool(torch.backends.mps.is_built() and torch.backends.mps.is_available())

    def device_count(self) -> int:
        """1, or 0 where there is none."""
        return 1 if self.is_available() else 0

    def device(self, local_rank: int) -> torch.device:
        """``torch.device("mps")`` for local rank 0.

        Raises:
            ConfigurationError: a second process would share the one GPU.
        """
        return torch.device("mps") if local_rank == 0 else super().device(local_rank)

    def set_current(self, device: torch.device) -> None:
        """Nothing to choose: there is one device."""

    def current(self) -> torch.device:
        """``torch.device("mps")``."""
        return torch.device("mps")

    def memory_allocated(self, index: int = 0) -> int:
        """Bytes that this process's tensors occupy."""
        return int(torch.mps.current_allocated_memory())

    def _memory_info(self, index: int) -> tuple[int, int]:
        # Memory is shared with the CPU; Metal recommends a working set, and beyond it everything slows down.
        total = int(torch.mps.recommended_max_memory())
        return max(total - int(torch.mps.driver_allocated_memory()), 0), total

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """As in the base class; bfloat16 needs macOS 14."""
        return super().supports_autocast(dtype) and (
            dtype is not torch.bfloat16 or torch.backends.mps.is_macos_or_newer(14, 0)
        )

    def manual_seed_all(self, seed: int) -> None:
        """Seed the one generator."""
        torch.mps.manual_seed(seed)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """A list of the one state."""
        return [torch.mps.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Put the one state back."""
        (state,) = states
        torch.mps.set_rng_state(state)

    def pci_address(self, index: int) -> str | None:
        """None: the GPU is on the same chip as the CPU."""
        return None
