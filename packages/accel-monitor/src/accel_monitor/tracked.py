"""What trackers get from the monitor: ``monitor/...`` among the values that a script logs, once in so many steps.

They come with values that the script logs itself, and so with a step of its choice: trackers accept no step that is
lower than one before, and an additional call with another count of steps would make them drop what the script logs.
Torch-free.
"""

from __future__ import annotations

from .parts import NAMES, STEP_PARTS
from .recorder import Recorder

LOGGED_STEPS = 50
"""Optimizer steps between two sets of values, at least."""


class TrackedValues:
    """Counts what a rank did between two sets of values.

    Args:
        recorder: of the rank.
        world_size: number of ranks.
    """

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self.seconds_at_peak: float | None = None
        """Seconds that the device would need for a step if it computed at its peak; None if unknown."""
        self._recorder, self._world_size = recorder, world_size
        self._before = recorder.snapshot()

    def due(self, memory: int | None, slow_rank: int | None) -> dict[str, float]:
        """Return the values since the last set, of this rank; empty if there were fewer than ``LOGGED_STEPS`` steps.

        Args:
            memory: bytes in use; None if unknown.
            slow_rank: the rank that the others wait for; None if there is none.
        """
        now, before = self._recorder.snapshot(), self._before
        steps = now.step - before.step
        if 0 <= steps < LOGGED_STEPS:
            return {}
        self._before = now
        if steps < 0:  # an earlier state was loaded
            return {}
        seconds = {part: now.seconds[part] - before.seconds[part] for part in STEP_PARTS}
        total = sum(seconds.values())
        values = {f"{NAMES[part]}_seconds": spent / steps for part, spent in seconds.items()}
        values |= {"step_seconds": total / steps, "samples_per_second": (now.samples - before.samples) / total}
        if now.tokens > before.tokens:
            values["tokens_per_second"] = (now.tokens - before.tokens) / total
        if memory is not None:
            values["memory_bytes"] = float(memory)
        if self.seconds_at_peak is not None:
            values["mfu"] = self.seconds_at_peak * steps / total
        if self._world_size > 1:
            values["slow_rank"] = -1.0 if slow_rank is None else float(slow_rank)
        return {f"monitor/{name}": value for name, value in values.items()}
