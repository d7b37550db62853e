"""The seconds by part and the steps of a process, in memory that may be shared. Torch-free.

A thread of the process adds up what the loop has noted (:mod:`accel_monitor.recorder`) and keeps the sums here; only
the number of steps is written by the loop itself. Where the memory is shared (:mod:`accel_monitor.live`), the next
process finds in it what a killed one did. There are two places for the sums, and one number that says which of them is
valid: a kill while they are written costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .parts import STEP_PARTS, Part

STEP_ENDS = 16
"""Added to the number of a part that begins with the end of an optimizer step."""
_IN_STEPS = frozenset(STEP_PARTS)

STEP = 1
"""Where the loop writes the number of its latest step."""
_VALID, _FIRST = 0, 2
_STEP_AT, _START, _SAMPLES, _TOKENS, _SECONDS = range(5)
_LENGTH = _SECONDS + len(Part)
NUMBERS = _FIRST + 2 * _LENGTH
"""Numbers in the memory, of 8 bytes each."""


@dataclass
class Counters:
    """The seconds by part and the steps up to one reading of the clock.

    Attributes:
        start: reading of the clock when the recorder was made.
        since: the reading up to which time is counted.
        part: the part that began with it.
        seconds: by part; they add up to ``since - start``.
        step: optimizer steps, including those of the checkpoint that was loaded.
        step_at: reading at the end of the latest step; None before the first.
        samples: samples of the batches for training.
        tokens: tokens of those batches; 0 if unknown.
        shares: by which shares a device divides the time of a step into its parts; None if the host's times count.
    """

    start: float
    since: float
    part: int = Part.STARTUP
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Part))
    step: int = 0
    step_at: float | None = None
    samples: int = 0
    tokens: int = 0
    shares: list[tuple[int, float]] | None = None

    def take(self, part: int, reading: float) -> bool:
        """Count the time up to the next reading, with which a part begins; returns whether a step ended there."""
        span = reading - self.since
        if self.shares is not None and self.part in _IN_STEPS:
            for of_step, share in self.shares:
                self.seconds[of_step] += span * share
        else:
            self.seconds[self.part] += span
        self.since, self.part = reading, part & ~STEP_ENDS
        if part & STEP_ENDS:
            self.step += 1
            self.step_at = reading
            return True
        return False

    def save(self, memory: memoryview[float]) -> None:
        """Write them, all valid at once; the step is the loop's own number."""
        other = 1 - int(memory[_VALID])
        first = _FIRST + other * _LENGTH
        numbers = (self.step_at or 0.0, self.start, self.samples, self.tokens, *self.seconds)
        for index, number in enumerate(numbers, first):
            memory[index] = number
        memory[_VALID] = other


def load(memory: memoryview[float]) -> Counters | None:
    """Return the counters in a copy of the memory, with the loop's step; None if they are not whole."""
    numbers = [float(number) for number in memory.tolist()]
    if numbers[_VALID] not in (0.0, 1.0):
        return None
    first = _FIRST + int(numbers[_VALID]) * _LENGTH
    step, (step_at, start, samples, tokens, *seconds) = numbers[STEP], numbers[first : first + _LENGTH]
    counts = (step, step_at, samples, tokens, *seconds)
    if not math.isfinite(start) or not all(math.isfinite(number) and number >= 0 for number in counts):
        return None
    return Counters(
        start,
        start + sum(seconds),
        seconds=seconds,
        step=int(step),
        step_at=step_at or None,
        samples=int(samples),
        tokens=int(tokens),
    )
