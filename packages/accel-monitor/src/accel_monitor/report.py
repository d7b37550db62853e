"""The ledger in words and numbers. Torch-free."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from accel_state.humanize import counted

from .ledger import Cause, Ledger, SaveAdvice
from .records import Run, bad_step_sentence

_BAR = 30


def report(ledger: Ledger) -> Iterator[str]:
    """Yield the lines of the report."""
    yield headline(ledger)
    yield ""
    ranks = len(ledger.entries)
    yield f"{'cause':<26}{'time per rank':>14}{'share':>8}"
    block = "█" if is_unicode() else "#"
    for cause, seconds in shares(ledger):
        share = seconds / ledger.total
        yield f"{cause.value:<26}{duration(seconds / ranks):>14}{share:>8.1%}  {block * round(share * _BAR)}".rstrip()
    yield f"{'total':<26}{duration(ledger.total / ranks):>14}{1:>8.1%}"
    yield ""
    yield f"wall clock: {duration(ledger.wall)}, from {clock(ledger.run.begin)} to {clock(ledger.run.end)}"
    yield from conclusions(ledger)
    for note in ledger.run.notes:
        yield f"note: {note}"


def headline(ledger: Ledger) -> str:
    """Return the goodput in one line."""
    hosts = {attempt.start["host"] for attempts in ledger.run.attempts.values() for attempt in attempts}
    starts = max(map(len, ledger.run.attempts.values()))
    started = "started once" if starts == 1 else f"started {starts} times"
    where = f"{counted(len(ledger.entries), 'rank')} on {counted(len(hosts), 'machine')}"
    return f"goodput {ledger.goodput:.1%}: the share of the time in productive steps ({where}, {started})"


def shares(ledger: Ledger) -> list[tuple[Cause, float]]:
    """Causes with their rank-seconds: productive steps, then the losses, largest first. Without those under 1 ms."""
    losses = [(cause, ledger.seconds[cause]) for cause in Cause if cause is not Cause.PRODUCTIVE]
    losses = sorted((loss for loss in losses if loss[1] >= 0.001), key=lambda loss: -loss[1])
    return [(Cause.PRODUCTIVE, ledger.seconds[Cause.PRODUCTIVE]), *losses]


def conclusions(ledger: Ledger) -> Iterator[str]:
    """Sentences on what was lost, and how often to save."""
    if ledger.failures:
        steps = counted(ledger.repeated_steps, "step")
        verb = "was" if ledger.repeated_steps == 1 else "were"
        yield f"{counted(ledger.failures, 'interruption')}; {steps} {verb} computed again"
    if ledger.advice is not None:
        yield advise(ledger.advice)
    yield from findings(ledger.run)


def findings(run: Run) -> Iterator[str]:
    """Yield what the monitor found in the latest processes: slow ranks that have not recovered, and bad steps."""
    for (_, rank), attempts in sorted(run.attempts.items()):
        latest = attempts[-1]
        for item in latest.stragglers[-1:]:
            if item.last == float("inf"):
                late = item.seconds * 1e3
                yield f"slow: rank {item.rank} ({item.part}), {late:.1f} ms per step from step {item.first} on"
        for event in latest.bad_steps[-3:]:
            yield f"bad: {bad_step_sentence(event, rank)}"


def advise(advice: SaveAdvice) -> str:
    """Return how often to save, and why."""
    measured = (
        f"a save takes {duration(advice.save_seconds)} and the run was interrupted every "
        f"{duration(advice.failure_seconds)}; Young's formula"
    )
    if advice.best_steps == advice.steps or advice.gain < 0.001:
        return f"saving every {counted(advice.steps, 'step')} loses about as little as possible ({measured})"
    return (
        f"saving every {counted(advice.best_steps, 'step')} instead of {advice.steps} would gain {advice.gain:.1%} "
        f"({measured})"
    )


def duration(seconds: float) -> str:
    """Return a duration with one or two units: ``3 h 05 min``, ``4 min 12 s``, ``8.1 s``, ``31 ms``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def clock(moment: float) -> str:
    """Return a moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def is_unicode() -> bool:
    """Return True if the output can show block characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "█".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
