"""Memory of a device beyond the tensors of a step: context, buffers of communicators, and the allocator's cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accel_state.hardware import HardwareProfile

from .record import Traffic


@dataclass(frozen=True)
class Reserve:
    """Bytes of a device that a process takes in addition to its tensors."""

    context: int  # of the driver and of libraries
    communication: int  # buffers of communicators
    allocator: int  # cached by torch, but not in use

    @property
    def total(self) -> int:
        """Sum in bytes."""
        return self.context + self.communication + self.allocator


def reserve_of(
    hardware: HardwareProfile | None, traffic: Iterable[Traffic], processes: int, peak: int
) -> Reserve | None:
    """Return what a rank needs in addition to its tensors; None without hardware, or if its profile has no values.

    Args:
        hardware: profile of the device.
        traffic: all communication of the rank. Each group has a communicator, and all ranks together have one.
        processes: number of ranks.
        peak: bytes of the tensors at the peak of a step.
    """
    if hardware is None or not (hardware.context_bytes or hardware.communicator_bytes or hardware.allocator_share):
        return None
    communicators = len({(item.axis, item.ranks) for item in traffic if item.ranks > 1}) + (processes > 1)
    return Reserve(
        context=hardware.context_bytes,
        communication=hardware.communicator_bytes * communicators,
        allocator=round(hardware.allocator_share * peak),
    )
