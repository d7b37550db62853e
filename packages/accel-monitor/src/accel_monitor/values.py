"""Losses and norms that the loop has: as numbers, or on their way from a device to the host.

The loop's stream copies a value of a device into pinned memory and records an event. Where the loop brings the next
value, it asks whether that event has happened. The monitor's thread reads what is known to be there and never calls
the device: neither it nor the loop waits, and a thread that asks for events would break the capture of a CUDA graph.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from accel_state import devices

_MOST_PENDING = 1024
_POLL_SECONDS = 0.001


class Pending:
    """A value on its way to the host.

    Attributes:
        copy: memory of the host that has the value once ``is_ready``.
        event: what the device does after the copy.
    """

    __slots__ = ("copy", "event", "is_ready")

    def __init__(self, copy: Tensor, event: Any) -> None:
        self.copy, self.event, self.is_ready = copy, event, False


class DeviceValues:
    """Copies values of one device to the host.

    Args:
        device: it has streams and events.
    """

    def __init__(self, device: torch.device) -> None:
        known = devices.get(device.type)
        self._streams, self._is_capturing, self._device = known.streams(), known.is_capturing, device
        self._pending: deque[Pending] = deque()
        self._free: list[Any] = []

    def take(self, tensor: Any) -> float | Pending | None:
        """Like :func:`value_of`, for a tensor that may be on the device; called by the loop.

        None also within the capture of a graph, and while the device is a thousand values behind.
        """
        if type(tensor) is not Tensor or tensor.device.type != self._device.type:
            return value_of(tensor)
        # A copy within a graph would be made by its replays, and a capture forbids to ask for events.
        if tensor.numel() != 1 or self._is_capturing():
            return None
        self.poll()
        if len(self._pending) >= _MOST_PENDING:
            return None
        copy = tensor.detach().to("cpu", non_blocking=True)
        event = self._free.pop() if self._free else self._streams.Event()
        event.record(self._streams.current_stream(tensor.device))
        value = Pending(copy, event)
        self._pending.append(value)
        return value

    def poll(self) -> bool:
        """Look which values are there; returns whether all are. Called by the loop."""
        pending = self._pending
        while pending and pending[0].event.query():
            value = pending.popleft()
            self._free.append(value.event)
            value.is_ready = True
        return not pending

    def settle(self, seconds: float) -> None:
        """Poll until all values are there, but no longer than this."""
        end = time.monotonic() + seconds
        while not self._is_capturing() and not self.poll() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def value_of(tensor: Any) -> Any:
    """Return a loss or a norm to remember: a number on the CPU, a copy on devices, since the loop may change
    its tensor before the copy is read.

    None for subclasses of tensors: reading the value of a DTensor may communicate.
    """
    if type(tensor) is not Tensor:
        return None
    if not tensor.is_cpu:
        return tensor.detach().clone() if tensor.numel() == 1 else None
    # Reads the memory. item() calls operators, whose code is not in the processor's caches: it takes twice as long.
    if not tensor.ndim:
        return tensor.tolist()
    return tensor.item() if tensor.numel() == 1 else None


def is_known(value: Any) -> bool:
    """Return True if a noted value can be read without waiting for a device that has events."""
    return not isinstance(value, Pending) or value.is_ready


def number(value: Any) -> float | None:
    """Return a noted value, which is known, as a number; None for what is none."""
    if isinstance(value, Pending):
        value = value.copy.item()
    elif isinstance(value, Tensor):
        value = value.item()  # of a device without streams, which computes in the order in which it is asked
    return float(value) if isinstance(value, (int, float)) else None
