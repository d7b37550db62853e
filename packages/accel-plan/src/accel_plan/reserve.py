"""Memory of a device that holds no tensors of the step: context, buffers of communication, and the allocator's gaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accel_state.hardware import HardwareProfile

from .record import Traffic


@dataclass(frozen=True)
class Reserve:
    """Bytes of a device to leave free for what the plan does not follow."""

    context: int  # of the driver and its libraries
    communication: int  # buffers of the communicators
    allocator: int  # what torch's caching allocator holds without using it

    @property
    def total(self) -> int:
        """All of it."""
        return self.context + self.communication + self.allocator


def reserve_of(
    hardware: HardwareProfile | None, traffic: Iterable[Traffic], processes: int, peak: int
) -> Reserve | None:
    """Return what a rank needs besides its tensors; None without hardware, or if its profile does not tell.

    Args:
        traffic: all communication of the rank. Each axis has a communicator, and all ranks together have one.
        processes: number of ranks.
        peak: bytes of the tensors at the peak of a step.
    """
    if hardware is None or not (hardware.context_bytes or hardware.communicator_bytes or hardware.allocator_share):
        return None
    communicators = len({item.axis for item in traffic if item.ranks > 1}) + (processes > 1)
    return Reserve(
        context=hardware.context_bytes,
        communication=hardware.communicator_bytes * communicators,
        allocator=round(hardware.allocator_share * peak),
    )
