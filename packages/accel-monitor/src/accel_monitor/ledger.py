"""What every second of a run was spent on, over all of its attempts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .parts import STEP_PARTS, Part
from .records import Attempt, Launches, Run, Sample


class Cause(Enum):
    """What a second was spent on; the value is its name in reports."""

    PRODUCTIVE = "productive steps"
    AGAIN = "steps computed again"
    LAUNCH = "start of the launcher"
    IMPORTS = "imports of the ranks"
    STARTUP = "start-up"
    COMPILING = "compiling"
    DATA = "waiting for data"
    WAITING = "waiting for other ranks"
    STRAGGLER = "waiting for a slow rank"
    SAVING = "saving"
    LOADING = "loading"
    EVALUATION = "evaluation"
    OTHER = "other code of the loop"
    EXIT = "exit of the ranks"
    LAUNCHER = "exit of the launcher"
    DEAD = "dead"
    BETWEEN = "between launches"


CAUSES = {
    Part.STARTUP: Cause.STARTUP,
    Part.DATA: Cause.DATA,
    Part.FORWARD: Cause.PRODUCTIVE,
    Part.BACKWARD: Cause.PRODUCTIVE,
    Part.WAITING: Cause.WAITING,
    Part.OPTIMIZER: Cause.PRODUCTIVE,
    Part.SAVING: Cause.SAVING,
    Part.LOADING: Cause.LOADING,
    Part.EVALUATION: Cause.EVALUATION,
    Part.COMPILING: Cause.COMPILING,
    Part.OTHER: Cause.OTHER,
}
_IN_STEPS = frozenset(STEP_PARTS)


@dataclass(frozen=True)
class Entry:
    """A span of a rank's life, and what it was spent on.

    Attributes:
        begin: seconds since the epoch, by the clock of the rank's host.
        end: the same.
        seconds: by cause; they add up to ``end - begin``.
    """

    begin: float
    end: float
    seconds: dict[Cause, float]


@dataclass(frozen=True)
class SaveAdvice:
    """How often to save, by Young's formula: every ``sqrt(2 * cost * time between failures)`` seconds.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974). A run that saves every
    T seconds, at a cost of C, and fails every M seconds on average, loses a share of C / T + T / (2 M).

    Attributes:
        save_seconds: C, the mean duration of a save.
        failure_seconds: M, the mean time between two failures.
        interval: T as it was: mean seconds between saves.
        best_interval: T that loses least.
        step_seconds: mean seconds of a step, to express T in steps.
        gain: the share of the run that the best interval would save; 0.04 is 4%.
    """

    save_seconds: float
    failure_seconds: float
    interval: float
    best_interval: float
    step_seconds: float
    gain: float

    @property
    def steps(self) -> int:
        """Steps between saves as it was."""
        return max(1, round(self.interval / self.step_seconds))

    @property
    def best_steps(self) -> int:
        """Steps between saves that lose least."""
        return max(1, round(self.best_interval / self.step_seconds))


@dataclass(frozen=True)
class Ledger:
    """What a run was spent on.

    Attributes:
        run: the run.
        entries: the life of each rank without gaps, by replica and rank.
        seconds: rank-seconds by cause: sums over all ranks.
        repeated_steps: steps that were computed again because they had not been saved, counted once for all ranks.
        failures: how often processes ended before the run was complete.
        advice: how often to save; None without a failure, or without saves.
    """

    run: Run
    entries: dict[tuple[int, int], list[Entry]]
    seconds: dict[Cause, float]
    repeated_steps: int
    failures: int
    advice: SaveAdvice | None

    @property
    def wall(self) -> float:
        """Seconds from the first start of a launcher or process to the last exit."""
        return self.run.end - self.run.begin

    @property
    def total(self) -> float:
        """Rank-seconds of all causes."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time in productive steps."""
        return self.seconds[Cause.PRODUCTIVE] / self.total if self.total else 0.0


def make_ledger(run: Run) -> Ledger:
    """Give every second of every rank to one cause.

    A second without a report, between two processes of a rank, is dead, or between launches if no launcher ran. Steps
    up to the highest that an earlier process of the rank had completed are computed again, with everything in them.
    """
    entries, repeated, failures = {}, 0, 0
    launches = Launches(attempt for attempts in run.attempts.values() for attempt in attempts)
    newest = max((attempts[-1] for attempts in run.attempts.values()), key=lambda attempt: attempt.begin)
    for slot, attempts in run.attempts.items():
        life = _Life(attempts, _slow_steps(run, slot, len(attempts)), launches)
        entries[slot] = life.entries
        last = attempts[-1]
        in_use = slot[0] != newest.slot[0] or slot[1] < newest.start["world_size"]
        if not last.finished and not last.running and in_use and run.end > last.gone:
            life.entries.append(_absent(last.gone, run.end, Cause.DEAD))
        repeated = max(repeated, life.repeated_steps)
        failures = max(failures, sum(not attempt.finished and not attempt.running for attempt in attempts))
    seconds = {cause: 0.0 for cause in Cause}
    for entry in (entry for of_slot in entries.values() for entry in of_slot):
        for cause, amount in entry.seconds.items():
            seconds[cause] += amount
    return Ledger(run, entries, seconds, repeated, failures, _advice(run, failures))


def _absent(begin: float, end: float, cause: Cause) -> Entry:
    return Entry(begin, end, {cause: end - begin})


def _exits(attempt: Attempt, shift: float) -> Iterator[Entry]:
    """Return the time between the last counters of a process, its exit, and that of its launcher."""
    begin = attempt.end
    cause = Cause.DEAD if attempt.finished is None else Cause.EXIT  # it was killed before it exited
    for end, what in ((attempt.exited, cause), (attempt.launcher_exited, Cause.LAUNCHER)):
        if end is not None and end > begin:
            yield Entry(begin + shift, end + shift, {what: end - begin})
            begin = end


def _slow_steps(run: Run, slot: tuple[int, int], count: int) -> list[list[tuple[int, float]]]:
    """For each process of a rank, the first and last steps in which other ranks were slow.

    Rank 0 of each replica finds them. Its processes are restarted with those of the other ranks.
    """
    leaders = run.attempts.get((slot[0], 0), [])[-count:]
    found: list[list[tuple[int, float]]] = [[] for _ in range(count - len(leaders))]
    for leader in leaders:
        found.append([(item.first - 1, item.last) for item in leader.stragglers if item.rank != slot[1]])
    return found


class _Life:
    """The entries of one rank, over its processes; ``slow`` are the steps of each in which others were slow."""

    def __init__(self, attempts: list[Attempt], slow: list[list[tuple[int, float]]], launches: Launches) -> None:
        self.entries: list[Entry] = []
        self.repeated_steps = 0
        self._reached = 0  # the highest step so far
        self._frontier = 0  # the highest step before the latest start or load: up to it, steps are repetitions
        end: float | None = None
        previous = attempts[0]
        for attempt, self._slow in zip(attempts, slow, strict=True):
            shift = 0.0
            if end is not None and attempt.begin > end:
                cause = Cause.BETWEEN if launches.changed(previous, attempt) else Cause.DEAD
                self.entries.append(_absent(end, attempt.begin, cause))
            elif end is not None:
                # Clocks of two hosts; or two runs at the same time, which a note of the run reports.
                shift = end - attempt.begin
            self.entries += self._attempt(attempt, shift)
            self.entries += _exits(attempt, shift)
            end, previous = attempt.gone + shift, attempt

    def _attempt(self, attempt: Attempt, shift: float) -> Iterator[Entry]:
        made, begin = float(attempt.start["time"]) + shift, attempt.begin + shift
        for end, cause in ((float(attempt.start["process_start"]) + shift, Cause.LAUNCH), (made, Cause.IMPORTS)):
            if end > begin:
                yield Entry(begin, end, {cause: end - begin})
                begin = end
        before = Sample(0.0, (0.0,) * len(Part), int(attempt.start.get("step", 0)))
        step, loads = before.step, list(attempt.loads)
        self._frontier = self._reached
        for sample in attempt.samples:
            steps = repeated = 0
            while loads and loads[0].at <= sample.at:
                load = loads.pop(0)
                steps += max(0, load.before - step)
                repeated += self._repeated(step, load.before)
                step = load.step
                self._frontier = self._reached = max(self._reached, load.before)
            steps += sample.step - step
            repeated += self._repeated(step, sample.step)
            self.repeated_steps += repeated
            # Between two steps, that is in the middle of one.
            again = repeated / steps if steps > 0 else float(step < self._frontier)
            seconds = _seconds(before, sample, again)
            self._blame(seconds, before.step, sample.step)
            yield Entry(made + before.at, made + sample.at, seconds)
            before, step = sample, max(sample.step, step)
            self._reached = max(self._reached, step)

    def _blame(self, seconds: dict[Cause, float], first: int, last: int) -> None:
        """Book the waiting of steps with a slow rank as such."""
        if Cause.WAITING not in seconds or last <= first:
            return
        steps = sum(max(0.0, min(last, end) - max(first, begin)) for begin, end in self._slow)
        share = min(1.0, steps / (last - first))
        if share:
            seconds[Cause.STRAGGLER] = seconds[Cause.WAITING] * share
            seconds[Cause.WAITING] *= 1 - share

    def _repeated(self, first: int, last: int) -> int:
        """Return how many of the steps after ``first``, up to ``last``, had been computed before."""
        return max(0, min(last, self._frontier) - first)


def _seconds(before: Sample, sample: Sample, again: float) -> dict[Cause, float]:
    """Return the time between two samples by cause, a share of whose steps had been computed before."""
    seconds: dict[Cause, float] = {}
    for part, late, early in zip(Part, sample.parts, before.parts, strict=True):
        amount = max(0.0, late - early)
        repeated = amount * again if part in _IN_STEPS else 0.0
        if repeated:
            seconds[Cause.AGAIN] = seconds.get(Cause.AGAIN, 0.0) + repeated
        if amount > repeated:
            cause = CAUSES[part]
            seconds[cause] = seconds.get(cause, 0.0) + amount - repeated
    return seconds


def _advice(run: Run, failures: int) -> SaveAdvice | None:
    attempts = [attempt for of_slot in run.attempts.values() for attempt in of_slot]
    saves = [seconds for attempt in attempts for seconds in attempt.saves]
    steps = sum(attempt.last_step - attempt.first_step for attempt in attempts)
    if not failures or not saves or steps < 1:
        return None
    in_steps = sum(
        sum(attempt.samples[-1].parts[part] for part in STEP_PARTS) for attempt in attempts if attempt.samples
    )
    cost, failure_seconds = sum(saves) / len(saves), (run.end - run.begin) / failures
    interval, best = in_steps / len(saves), math.sqrt(2 * cost * failure_seconds)

    def loss(seconds: float) -> float:
        return cost / seconds + seconds / (2 * failure_seconds)

    if interval <= 0 or best <= 0:
        return None
    return SaveAdvice(cost, failure_seconds, interval, best, in_steps / steps, loss(interval) - loss(best))
