"""The page of ``accel monitor``: what each rank does, as lines of text for any width. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .parts import STEP_PARTS, Part
from .records import Attempt, Run, Sample, file_name
from .report import duration, findings

_STATES = {
    Part.STARTUP: "starting",
    Part.COMPILING: "compiling",
    Part.SAVING: "saving",
    Part.LOADING: "loading",
    Part.EVALUATION: "evaluating",
}
# One letter a part: the bar must be readable without colours.
LETTERS = {
    Part.DATA: "D",
    Part.FORWARD: "F",
    Part.BACKWARD: "B",
    Part.WAITING: "w",
    Part.OPTIMIZER: "O",
    Part.OTHER: ".",
    Part.EVALUATION: "E",
    Part.SAVING: "S",
    Part.LOADING: "L",
    Part.COMPILING: "C",
    Part.STARTUP: "-",
}
_MEANINGS = {Part.WAITING: "waiting for others", Part.STARTUP: "start-up"}
_OWN = (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
_SILENT_INTERVALS, _SILENT_SECONDS = 5, 15.0
_HUNG_STEPS, _HUNG_SECONDS = 10, 60.0
_BINS = 8


@dataclass(frozen=True)
class Row:
    """What a rank did between its last two reports.

    Attributes:
        slot: replica and rank.
        host: its machine.
        state: one word.
        step: optimizer steps.
        own: seconds of a step that the rank worked itself, without waiting for others; None without a step.
        rate: samples per second; None if unknown.
        memory: bytes; None if unknown.
        loss: the latest loss.
        parts: seconds by part.
        flops: floating-point operations per second, without those computed again; None if unknown.
        mfu: their share of what the device can compute; None if unknown.
    """

    slot: tuple[int, int]
    host: str
    state: str
    step: int
    own: float | None
    rate: float | None
    memory: int | None
    loss: float | str | None
    parts: tuple[float, ...]
    flops: float | None = None
    mfu: float | None = None


def rows_of(run: Run, now: float | None = None) -> list[Row]:
    """Return the rows of all ranks, by replica and rank.

    Args:
        run: a run that was just read.
        now: the time, in seconds since the epoch; by default the current one.
    """
    moment = time.time() if now is None else now
    return [_row(run, attempts[-1], moment) for _, attempts in sorted(run.attempts.items())]


def _row(run: Run, attempt: Attempt, now: float) -> Row:
    none = Sample(0.0, (0.0,) * len(Part), attempt.first_step)
    last = attempt.samples[-1] if attempt.samples else none
    earlier = [sample for sample in attempt.samples[:-1] if last.at - sample.at >= 0.5]
    before = earlier[-1] if earlier else none
    parts = tuple(max(0.0, late - early) for late, early in zip(last.parts, before.parts, strict=True))
    steps, seconds = last.step - before.step, last.at - before.at
    # Saving and evaluation are no part of how well a step uses the device.
    in_steps = sum(parts[part] for part in STEP_PARTS)
    flops = attempt.step_flops * steps / in_steps if attempt.step_flops and steps > 0 and in_steps > 0 else None
    return Row(
        slot=attempt.slot,
        host=attempt.start["host"],
        state=_state(run, attempt, last, now),
        step=last.step,
        own=sum(parts[part] for part in _OWN) / steps if steps > 0 else None,
        rate=(last.samples - before.samples) / seconds if seconds > 0 and steps > 0 else None,
        # The record of a step in shared memory is newer than the latest report, which has the rest.
        memory=_latest(attempt, "memory"),
        loss=_latest(attempt, "loss"),
        parts=parts,
        flops=flops,
        mfu=flops / attempt.peak_flops if flops and attempt.peak_flops else None,
    )


def _latest(attempt: Attempt, name: str) -> Any:
    values = (getattr(sample, name) for sample in reversed(attempt.samples))
    return next((value for value in values if value is not None), None)


def _state(run: Run, attempt: Attempt, last: Sample, now: float) -> str:
    if attempt.finished is not None:
        return "finished" if attempt.finished else "ended"
    silence = max(_SILENT_SECONDS, _SILENT_INTERVALS * float(attempt.start.get("interval", 2.0)))
    if attempt.running is False or now - _written(run, attempt) > silence:
        return "dead"
    reported = next((sample for sample in reversed(attempt.samples) if sample.part is not None), None)
    if reported is None:
        return "training" if last.step > attempt.first_step else "starting"
    # A step that was completed after the report is in shared memory.
    if reported.part in _STATES and last.step == reported.step:
        return _STATES[reported.part]
    # The mean up to the latest step: the time after it may be that of the hang.
    mean = (last.step_at or 0.0) / max(1, last.step - attempt.first_step)
    since = last.at - (last.step_at or 0.0)
    return "hung" if since > max(_HUNG_SECONDS, _HUNG_STEPS * mean) else "training"


def _written(run: Run, attempt: Attempt) -> float:
    """When the rank reported last, by the clock of the file system: those of hosts may differ."""
    replica, rank = attempt.start["replica"], attempt.start["rank"]
    try:
        return (run.directory / f"{file_name(replica, rank)}.now").stat().st_mtime
    except OSError:
        return attempt.written or 0.0


def render(run: Run, width: int, height: int, now: float | None = None) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        run: a run that was just read.
        width: columns; at least 60 are used.
        height: lines; with more ranks than fit, those that are not training and the slowest are shown.
        now: see :func:`rows_of`.
    """
    width, rows = max(width, 60), rows_of(run, now)
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    steps = [row.step for row in rows]
    step = f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    rate = sum(row.rate or 0.0 for row in rows)
    text = f"{len(rows)} ranks: {counts}; {step}, {rate:.4g} samples/s, {duration(run.end - run.begin)}"
    computed = [row.flops for row in rows if row.flops is not None]
    if computed:
        text += f", {_operations(sum(computed))}"
    used = [row.mfu for row in rows if row.mfu is not None]
    if used:
        text += f", MFU {sum(used) / len(used):.1%}"
    yield text[:width]
    named = width >= 110
    head = f"{'rank':>6} {'state':<10} {'step':>8} {'own/step':>9} {'samples/s':>9} {'memory':>8} {'loss':>9}"
    host_width = max(4, *(len(row.host) for row in rows)) if named else 0
    if named:
        head += f" {'host':<{host_width}}"
    yield f"{head} time by part"[:width]
    room = max(4, height - 6 - _BINS)
    shown = rows
    if len(rows) > room:
        urgent = sorted(rows, key=lambda row: (row.state == "training", -(row.own or 0.0)))[:room]
        shown = sorted(urgent, key=lambda row: row.slot)
    several = len({row.slot[0] for row in rows}) > 1
    bars = [_bar(row.parts, width - len(head) - 1) for row in shown]
    for row, bar in zip(shown, bars, strict=True):
        yield _line(row, several, host_width, bar)
    if len(shown) < len(rows):
        yield f"{len(shown)} of {len(rows)} ranks: those that are not training, then the slowest"
        yield from _histogram([row.own for row in rows if row.own is not None], width)
    yield from _legend("".join(bars), width)
    yield from findings(run)
    for note in run.notes:
        yield f"note: {note}"


def _line(row: Row, several: bool, host_width: int, bar: str) -> str:
    name = f"{row.slot[0]}/{row.slot[1]}" if several else str(row.slot[1])
    own = "-" if row.own is None else duration(row.own)
    rate = "-" if row.rate is None else f"{row.rate:.4g}"
    memory = "-" if row.memory is None else f"{row.memory / 2**30:.2f} GiB"
    loss = f"{row.loss:.4g}" if isinstance(row.loss, (int, float)) else str(row.loss or "-")
    text = f"{name:>6} {row.state:<10} {row.step:>8} {own:>9} {rate:>9} {memory:>8} {loss:>9}"
    host = f" {row.host:<{host_width}}" if host_width else ""
    return f"{text}{host} {bar}"


def _operations(each_second: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if each_second >= unit:
            return f"{each_second / unit:.4g} {name}FLOP/s"
    return f"{each_second / 1e6:.4g} MFLOP/s"


def _legend(bars: str, width: int) -> Iterator[str]:
    """Yield what the letters of the bars mean."""
    line = ""
    for part, letter in LETTERS.items():
        if letter not in bars:
            continue
        text = f"{letter} {_MEANINGS.get(part, part.name.lower())}"
        if line and len(line) + 3 + len(text) > width:
            yield f"{line},"
            line = ""
        line += f"{', ' if line else ''}{text}"
    if line:
        yield line


def _bar(parts: tuple[float, ...], width: int) -> str:
    total = sum(parts)
    if total <= 0 or width < 1:
        return ""
    text, reached = "", 0.0
    for part, letter in LETTERS.items():
        reached += parts[part]
        # From the running sum, so that rounding never makes the bar longer or shorter.
        text += letter * (round(reached / total * width) - len(text))
    return text


def _histogram(own: list[float], width: int) -> Iterator[str]:
    if not own:
        return
    low, high = min(own), max(own)
    size = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for seconds in own:
        counts[min(_BINS - 1, int((seconds - low) / size))] += 1
    for index, count in enumerate(counts):
        bar = "#" * round(count / max(counts) * (width - 30))
        yield f"{duration(low + index * size):>10} own/step {count:>6} {bar}"
