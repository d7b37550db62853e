"""Divides the time of the training loop into parts. This is what runs on the path of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from .parts import Part


@dataclass(frozen=True)
class Snapshot:
    """The counters of a recorder at one moment.

    Attributes:
        seconds: since the recorder was made, by part; they add up to ``elapsed``.
        elapsed: seconds since the recorder was made.
        part: what the rank is doing.
        step: optimizer steps, including those of the checkpoint that was loaded.
        samples: samples of the batches for training.
        tokens: tokens of those batches; 0 if they have no ``input_ids``.
        step_at: value of ``elapsed`` at the end of the latest step; None before the first.
    """

    seconds: list[float]
    elapsed: float
    part: Part
    step: int
    samples: int
    tokens: int
    step_at: float | None


class Recorder:
    """The time of one process by part, and its counters.

    The loop calls :meth:`switch` at each boundary, so that the parts always add up to the time that has passed. A
    thread reads with :meth:`snapshot`; nothing is locked.
    """

    __slots__ = (
        "evaluating",
        "idle",
        "loss",
        "models",
        "on_step",
        "part",
        "samples",
        "seconds",
        "since",
        "start",
        "step",
        "step_at",
        "tokens",
    )

    def __init__(self) -> None:
        self.seconds = [0.0] * len(Part)
        self.part: int = Part.STARTUP
        self.idle: int = Part.STARTUP
        """The part between two others: start-up before the first batch, then OTHER."""
        self.start = self.since = perf_counter()
        self.step = 0
        self.samples = 0
        self.tokens = 0
        self.step_at: float | None = None
        self.loss: Any = None
        """The latest loss, a detached tensor."""
        self.models: list[Any] = []
        """The models whose ``training`` says whether batches are for training."""
        self.evaluating = False
        """Whether the latest forward pass was without gradients, or of a model in evaluation mode."""
        self.on_step: Callable[[Recorder], None] | None = None
        """Called after each step."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and optimizers refer to it in their hooks; their pickles and copies are not measured.
        return Recorder, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    def switch(self, part: int) -> None:
        """End the current part, and begin another."""
        now = perf_counter()
        self.seconds[self.part] += now - self.since
        self.since = now
        self.part = part

    def count(self, samples: int, tokens: int) -> None:
        """Count a batch for training."""
        self.samples += samples
        self.tokens += tokens
        self.idle = Part.OTHER

    def step_done(self) -> None:
        """Count an optimizer step, after :meth:`switch`."""
        self.step += 1
        self.step_at = self.since
        if self.on_step is not None:
            self.on_step(self)

    def snapshot(self) -> Snapshot:
        """The counters now; may be called from another thread."""
        while True:
            since, part = self.since, self.part
            seconds = list(self.seconds)
            samples, tokens, step, step_at = self.samples, self.tokens, self.step, self.step_at
            if since == self.since:
                break
        elapsed = perf_counter() - self.start
        # What the loop has not booked yet belongs to the current part. By difference, so that the sum is exact even
        # if the loop was interrupted between adding a part and moving `since`.
        seconds[part] += elapsed - sum(seconds)
        return Snapshot(
            seconds,
            elapsed,
            Part(part),
            step,
            samples,
            tokens,
            None if step_at is None else step_at - self.start,
        )
