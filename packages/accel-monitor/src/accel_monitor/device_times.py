"""Divides a step into its parts by events of a device, on which the host only queues work.

The loop records an event on its stream wherever a part begins, in some of the steps: each event costs it a few
microseconds. Some steps later, when the last event of a step has happened, the times between them are read. Nothing
waits for the device. The host's seconds of the steps that follow are divided as the device has divided this one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from accel_state import devices

from .counters import STEP_ENDS
from .parts import STEP_PARTS, Part
from .recorder import ON_DEVICE, Recorder

_SECONDS_BETWEEN = 0.01
"""Between the ends of two measured steps at least: of shorter steps some are measured."""
_MOST_PENDING = 8
"""Measured steps whose events have not happened. The loop is far ahead of the device, and others tell as much."""


class DeviceTimes:
    """Measures steps of a loop on a device.

    Args:
        recorder: of the loop; a boundary also records an event from now on, in the steps that are measured.
        device: where the loop computes; it has streams and events.
        failed: called with the reason if its events have no times; the host's count then.

    Attributes:
        pending: the parts and events of measured steps that are not read.
    """

    def __init__(self, recorder: Recorder, device: torch.device, failed: Callable[[str], None]) -> None:
        self._recorder, self._device, self._failed = recorder, device, failed
        known = devices.get(device.type)
        self._streams, self._is_capturing = known.streams(), known.is_capturing
        self._free: list[Any] = []
        self._step: list[tuple[int, Any]] | None = None  # of the step that is measured now
        self._measured_at = 0.0
        self.pending: deque[list[tuple[int, Any]]] = deque()
        recorder.also = self.mark

    def mark(self, part: int) -> None:
        """Record an event where a part begins."""
        if self._step is not None:
            self._record(part)
        if part & STEP_ENDS:
            self._end_step()

    def _record(self, part: int) -> None:
        assert self._step is not None
        if self._is_capturing():
            # The event would belong to the graph. A replay runs no hooks, and so such a step is not measured.
            self._free += [event for _, event in self._step]
            self._step = None
            return
        event = self._free.pop() if self._free else self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self._device))
        self._step.append((part & ~STEP_ENDS, event))

    def _end_step(self) -> None:
        if self._step is not None:
            self.pending.append(self._step)
            self._step = None
        if self._is_capturing():
            return  # which forbids to ask for events
        # The last one first: most steps have not ended, and a part may be on a stream of its own.
        if self.pending and all(event.query() for _, event in reversed(self.pending[0])):
            self._read(self.pending.popleft())
        now = perf_counter()
        if now - self._measured_at >= _SECONDS_BETWEEN and len(self.pending) < _MOST_PENDING:
            self._measured_at, self._step = now, []
            self._record(Part.OTHER)

    def _read(self, step: list[tuple[int, Any]]) -> None:
        seconds = [0.0] * len(Part)
        try:
            for (part, begin), (_, end) in pairwise(step):
                seconds[part] += max(0.0, begin.elapsed_time(end) / 1e3)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            self.stop()
            self._failed(str(error).partition("\n")[0])
            return
        self._free += [event for _, event in step]
        self._recorder.note(ON_DEVICE, [seconds[part] if part in STEP_PARTS else 0.0 for part in Part])

    def stop(self) -> None:
        """Record no more events."""
        self._step, self._measured_at = None, math.inf
        self.pending.clear()
