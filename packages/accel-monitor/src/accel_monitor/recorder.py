"""Notes when each part of the training loop begins, and adds up the seconds by part in another thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from .counters import NUMBERS, STEP, STEP_ENDS, Counters
from .parts import STEP_PARTS, Part

RECENT_STEPS = 1024
"""Steps of which the time by part is kept."""
_STEP_ENDS = int(Part.OTHER) + STEP_ENDS
_MOST_NOTES = 1 << 15

LOSS, NORM, GROUP, INDICES, SAMPLES, TOKENS, ON_DEVICE = range(2 * STEP_ENDS, 2 * STEP_ENDS + 7)
SKIPPED, DRAWN, RAN = range(ON_DEVICE + 1, ON_DEVICE + 4)
"""What the loop notes besides parts. As values of :meth:`Recorder.note`: the loss and the gradient norm, the parameter
group that made the norm too large, the indices of a batch, its samples and tokens, and a step that a device has
measured; and the :class:`Drawn` of a batch for evaluation. By themselves: that of a batch for training, and the
processor time so far."""


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
        seconds: of the step, by part.
        on_device: whether they are those of the latest step that the device has measured, and not the host's.
        ran: processor time of the loop's thread in it; 0 if the steps are not compared with those of other ranks.
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
    on_device: bool = False


class Drawn:
    """The batches of indices that a sampler has drawn in one iteration, which a loader hands out in the same order.

    Attributes:
        batches: by number, from 0. The loader adds them, and the thread that adds up removes them.
    """

    __slots__ = ("_taken", "batches")

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}
        self._taken = 0

    def take(self) -> Any:
        """Return the indices of the next batch that was handed out; None if the sampler does not tell."""
        self._taken += 1
        return self.batches.pop(self._taken - 1, None)


class Recorder:
    """The time of one process by part, and its counters.

    The loop notes each boundary between parts, and what else is known of a step, by appending two things to a queue:
    what is noted, an integer, and a reading of the clock or a value, which is none. More would cost a short step more
    than it seems to, because what it needs is not in the processor's caches after a model's passes: a function of torch
    that takes 0.2 microseconds in a loop takes 2 there. What runs in every step therefore appends by itself, and the
    thread that reads (:meth:`snapshot`, :meth:`latest`) does the rest. A signal handler may note something between the
    two; its notes are whole when it returns.

    Attributes:
        append: appends to the queue; always two things.
        extend: appends all of several things.
        also: called at each boundary with the part that begins; None without a device that is measured.
    """

    __slots__ = (
        "__weakref__", "_begun", "_counters", "_done", "_lock", "_memory", "_noted", "_queue", "_recent", "_seconds",
        "after_batch", "also", "append", "compares", "evaluating", "extend", "flops", "idle", "is_new_batch", "loss",
        "models",
    )  # fmt: skip

    def __init__(self) -> None:
        self.idle: int = Part.STARTUP
        """The part between two others: start-up before the first batch, then OTHER."""
        self.after_batch: int = Part.OTHER
        """The part that begins with a batch for training."""
        self.is_new_batch: bool = False
        """Whether there was no backward pass since the latest batch."""
        self.compares: bool = True
        """Whether the steps are compared with those of other ranks, which needs the processor time of each."""
        self.loss: Any = None
        """The latest loss that was added up: a number on the CPU, else a copy on its device."""
        self.models: list[Any] = []
        """The models whose ``training`` says whether batches are for training."""
        self.evaluating: bool = False
        """Whether the latest forward pass was without gradients, or of a model in evaluation mode."""
        self.flops: Any = None
        """Counts the operations of a step (:class:`accel_monitor.flops.FlopCount`); None when that is done."""
        self._lock = threading.Lock()
        self._done = 0.0  # a number of the kind that is in the memory: converting it takes longer
        self._queue: deque[Any] = deque()
        self._begun: list[int] = []  # what is noted next, whose value was not appended yet
        self._noted = _Noted()
        self._recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self._seconds = [0.0] * len(Part)  # at the end of the latest step that is added up
        self.append: Callable[[Any], None] = self._queue.append
        self.extend: Callable[[tuple[Any, ...]], None] = self._queue.extend
        self.also: Callable[[int], None] | None = None
        now = perf_counter()
        self._counters = Counters(now, now)
        self.use(_own_memory())
        _alive.add(self)

    def use(self, memory: memoryview[float]) -> None:
        """Keep the counters in this memory from now on; called by the loop."""
        with self._lock:
            self._memory = memory
            memory[STEP] = self._done
            self._add_up()

    def __reduce__(self) -> tuple[Any, ...]:
        # Models and optimizers refer to it in their hooks; their pickles and copies are not measured.
        return Recorder, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    @property
    def step(self) -> int:
        """Optimizer steps, including those of the checkpoint that was loaded."""
        return int(self._done)

    def mark(self, part: int) -> None:
        """End the current part, and begin this one."""
        self.append(part)
        self.append(perf_counter())
        if self.also is not None:
            self.also(part)

    def note(self, what: int, value: Any) -> None:
        """Note a value of the current step: what it is (``LOSS`` and so on), and the value."""
        self.extend((what, (value,)))

    def marker(self, part: int) -> Callable[..., None]:
        """Return a function that begins a part, as a hook with any arguments."""
        append, also, now = self.append, self.also, perf_counter

        def begin(*_: Any) -> None:
            append(part)
            append(now())
            if also is not None:
                also(part)

        return begin

    def step_done(self, *_: Any) -> None:
        """End the current part, and count an optimizer step; a hook of the optimizer."""
        append = self.append
        self._memory[STEP] = self._done = self._done + 1.0
        if self.compares:
            # The only system call of a step, which costs a virtual machine more than everything else that is measured.
            append(RAN)
            append(thread_time())
        append(_STEP_ENDS)
        append(perf_counter())
        if self.also is not None:
            self.also(_STEP_ENDS)
        if self.flops is not None:
            self.flops.end_step()
        if len(self._queue) > _MOST_NOTES:
            self.bound()

    def bound(self) -> None:
        """Add up if the thread does not, because a file system does not answer: the queue must not grow without end."""
        if len(self._queue) > _MOST_NOTES:
            self.add_up()

    @property
    def part(self) -> int:
        """The current part; called by the loop."""
        try:
            place = -2
            while not isinstance(what := self._queue[place], int) or what >= LOSS:
                place -= 1
            return what & ~STEP_ENDS
        except IndexError:  # added up
            with self._lock:
                self._add_up()
                return self._counters.part

    @property
    def start(self) -> float:
        """When the recorder was made, as ``time.perf_counter`` has it."""
        return self._counters.start

    def begin_at(self, step: int) -> None:
        """Set how many optimizer steps are in the state that the script has loaded."""
        with self._lock:
            self._add_up()
            self._memory[STEP] = self._done = float(step)
            self._counters.step = step

    def add_up(self) -> None:
        """Add up what the loop has noted; may be called from another thread."""
        with self._lock:
            self._add_up()

    def _add_up(self) -> None:
        counters, noted, begun, take = self._counters, self._noted, self._begun, self._queue.popleft
        for _ in range(len(self._queue)):
            item = take()
            if isinstance(item, int):
                begun.append(item)
                continue
            what = begun.pop()
            if what < LOSS:
                if counters.take(what, item):
                    self._end_step()
            else:
                noted.take(what, item)
        counters.samples, counters.tokens = noted.samples, noted.tokens
        if noted.loss is not None:
            self.loss = noted.loss
        counters.save(self._memory)

    def _end_step(self) -> None:
        counters, noted = self._counters, self._noted
        seconds = [now - before for now, before in zip(counters.seconds, self._seconds, strict=True)]
        on_device = noted.on_device
        if on_device is not None:
            seconds = [on_device[part] if part in STEP_PARTS else seconds[part] for part in Part]
            total = sum(on_device)
            counters.shares = [(part, on_device[part] / total) for part in STEP_PARTS] if total > 0 else None
        values = noted.ran, noted.loss, noted.norm, noted.group, noted.indices
        self._recent.append(StepRecord(counters.step, seconds, *values, on_device is not None))
        self._seconds = list(counters.seconds)
        noted.end_step()

    def latest(self, at_most: int = RECENT_STEPS, after: StepRecord | None = None) -> list[StepRecord]:
        """Return the latest steps, oldest first; may be called from another thread.

        Args:
            at_most: how many.
            after: a record that was returned before: only those that followed it. Their steps may begin again, where a
                state was loaded.
        """
        with self._lock:
            self._add_up()
            found: list[StepRecord] = []
            for record in reversed(self._recent):
                if len(found) == at_most or record is after:
                    break
                found.append(record)
        return found[::-1]

    def forget(self, keep: int) -> None:
        """Forget all steps but the latest; may be called from another thread.

        Each holds the indices of its samples, which are many with large batches.
        """
        with self._lock:
            while len(self._recent) > keep:
                self._recent.popleft()

    def snapshot(self) -> Snapshot:
        """Return the counters now; may be called from another thread."""
        with self._lock:
            self._add_up()
            counters = replace(self._counters, seconds=list(self._counters.seconds))
            # What the loop has not ended yet belongs to the current part.
            counters.take(counters.part, perf_counter())
            return Snapshot(
                counters.seconds,
                counters.since - counters.start,
                Part(counters.part),
                counters.step,
                counters.samples,
                counters.tokens,
                None if counters.step_at is None else counters.step_at - counters.start,
            )

    def after_fork(self) -> None:
        """In a forked process: leave the memory of the parent alone."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._queue.clear()
        self.use(_own_memory())


_LATEST = {LOSS: "loss", NORM: "norm", GROUP: "group", ON_DEVICE: "on_device"}
"""What is noted of which the latest value counts, as attributes of :class:`_Noted`."""


class _Noted:
    """What the loop has noted of the current step, and counts.

    Attributes:
        ran: processor time of the step.
        on_device: seconds by part of the latest step that a device has measured; None without.
    """

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        self.loss: Any = None
        self.ran = self._ran = 0.0
        self.on_device: list[float] | None = None
        self.end_step()

    def end_step(self) -> None:
        self.norm: Any = None
        self.group: int | None = None
        self.indices: list[Any] | None = None

    def take(self, what: int, value: Any) -> None:
        if what == RAN:
            self.ran, self._ran = value - self._ran, value
        elif what in (DRAWN, INDICES):
            self.indices = [*(self.indices or ()), value.take() if what == DRAWN else value[0]]
        elif what == SAMPLES:
            self.samples += value[0]
        elif what == TOKENS:
            self.tokens += value[0]
        elif what == SKIPPED:
            value[0].take()
        else:
            setattr(self, _LATEST[what], value[0])


def _own_memory() -> memoryview[float]:
    return memoryview(bytearray(8 * NUMBERS)).cast("d")


_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    for recorder in _alive:
        recorder.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
