"""Divides the time of the training loop into parts. This is what runs on the path of a step."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from .parts import Part

RECENT_STEPS = 1024
"""Steps of which the time by part is kept."""
_STEP, _SAMPLES, _TOKENS, _STEP_AT, _SECONDS = range(5)
COUNTERS = _SECONDS + len(Part)
"""Numbers in the counters of a recorder: step, samples, tokens, end of the latest step, and seconds by part."""


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


class StepRecord(NamedTuple):
    """What is remembered of a step.

    Attributes:
        step: its number, from 1.
        seconds: counters of the seconds by part at its end.
        ran: processor time of the loop's thread at its end; 0 if the steps are not compared with those of other ranks.
        loss: the last loss of the step: a number on the CPU, else a copy on its device; None if unknown.
        norm: the gradient norm that the script computed, likewise.
        group: the parameter group that made the norm too large or not finite; None if unknown.
        indices: those of the samples of the step's batches on this rank; None if the loader does not tell.
    """

    step: int
    seconds: list[float]
    ran: float
    loss: Any
    norm: Any
    group: int | None
    indices: Any


def _own_memory() -> memoryview[float]:
    return memoryview(bytearray(8 * COUNTERS)).cast("d")


class Recorder:
    """The time of one process by part, and its counters.

    The loop calls :meth:`switch` at each boundary, so that the parts always add up to the time that has passed. A
    thread reads with :meth:`snapshot`; nothing is locked.

    Attributes:
        counters: the numbers that survive the process if they are in shared memory (:mod:`accel_monitor.live`).
        recent: the latest steps.
    """

    __slots__ = (
        "__weakref__",
        "after_batch",
        "backwards",
        "compares",
        "counters",
        "evaluating",
        "flops",
        "group",
        "idle",
        "indices",
        "loss",
        "models",
        "norm",
        "on_step",
        "part",
        "recent",
        "samples",
        "seconds",
        "since",
        "start",
        "step",
        "step_at",
        "tokens",
    )

    counters: memoryview[float]
    seconds: memoryview[float]

    def __init__(self) -> None:
        self.part: int = Part.STARTUP
        self.idle: int = Part.STARTUP
        """The part between two others: start-up before the first batch, then OTHER."""
        self.after_batch: int = Part.OTHER
        """The part that begins with a batch for training."""
        self.backwards = 0
        """Backward passes since the latest batch."""
        self.compares = True
        """Whether the steps are compared with those of other ranks, which needs the processor time of each."""
        self.start = self.since = perf_counter()
        self.step = 0
        self.samples = 0
        self.tokens = 0
        self.step_at: float | None = None
        self.loss: Any = None
        """The latest loss: a number on the CPU, else a copy on its device."""
        self.norm: Any = None
        """The latest gradient norm that the script computed, likewise."""
        self.group: int | None = None
        """The parameter group that made the latest norm too large."""
        self.indices: Any = None
        """Indices of the samples of the batches since the latest step."""
        self.models: list[Any] = []
        """The models whose ``training`` says whether batches are for training."""
        self.evaluating = False
        """Whether the latest forward pass was without gradients, or of a model in evaluation mode."""
        self.flops: Any = None
        """Counts the operations of a step (:class:`accel_monitor.flops.FlopCount`); None when that is done."""
        self.on_step: Callable[[Recorder], None] | None = None
        """Called after each step."""
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=RECENT_STEPS)
        self.use(_own_memory())
        _alive.add(self)

    def use(self, counters: memoryview[float]) -> None:
        """Keep the counters in this memory from now on, with their present values."""
        counters[:] = getattr(self, "counters", counters)
        self.counters = counters
        self.seconds = counters[_SECONDS:]

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and optimizers refer to it in their hooks; their pickles and copies are not measured.
        return Recorder, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    def begin_at(self, step: int) -> None:
        """Set how many optimizer steps are in the state that the script has loaded."""
        self.step = step
        self.counters[_STEP] = step

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
        self.backwards = 0

    def step_done(self) -> None:
        """Count an optimizer step, after :meth:`switch`."""
        self.step = step = self.step + 1
        self.step_at = since = self.since
        counters = self.counters
        counters[_STEP] = step
        counters[_SAMPLES] = self.samples
        counters[_TOKENS] = self.tokens
        counters[_STEP_AT] = since - self.start
        # The only system call of a step, which costs a virtual machine more than everything else that is measured.
        ran = thread_time() if self.compares else 0.0
        # A plain tuple, read as a StepRecord: making an object costs the loop a microsecond.
        record = (step, self.seconds.tolist(), ran, self.loss, self.norm, self.group, self.indices)
        self.recent.append(record)
        self.norm = self.group = self.indices = None
        if self.flops is not None:
            self.flops.end_step()
        if self.on_step is not None:
            self.on_step(self)

    def latest(self, at_most: int = RECENT_STEPS, after: StepRecord | None = None) -> list[StepRecord]:
        """The latest steps, oldest first; may be called from another thread.

        Args:
            at_most: how many.
            after: a record that was returned before: only those that followed it. Their steps may begin again, where a
                state was loaded.
        """
        while True:
            try:
                records = list(self.recent)
                break
            except RuntimeError:  # the loop has appended meanwhile
                continue
        found: list[StepRecord] = []
        for record in reversed(records):
            # By the counters, which no other step shares.
            if len(found) == at_most or (after is not None and record[1] is after.seconds):
                break
            found.append(StepRecord._make(record))
        return found[::-1]

    def forget(self, keep: int) -> None:
        """Forget all steps but the latest; may be called from another thread.

        Each holds the indices of its samples, which are many with large batches.
        """
        while len(self.recent) > keep:
            self.recent.popleft()

    def snapshot(self) -> Snapshot:
        """The counters now; may be called from another thread."""
        while True:
            since, part = self.since, self.part
            seconds: list[float] = list(self.seconds)
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


_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked process must not write to the counters of its parent."""
    for recorder in _alive:
        recorder.use(_own_memory())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
