"""Finds the rank for which the others wait. Torch-free.

Ranks synchronise in every step, so that all steps take the same time: what counts is a rank's own time, the time of a
step without waiting. Each rank reports it for its latest steps (``recent`` in its ``.now`` file), and the reporter of
rank 0 compares them. No rank communicates for it.

A rank is named when its own time exceeds the median of the other ranks in the steps that all of them report, by a share
of the step, in most of the steps, and by several times what the difference varies. The largest and smallest differences
are left out, so that a few interruptions do not count; a rank that is slow in one step of four is not named. The part
that exceeds most is the reason.

On a machine that others use, all ranks lack a processor for a part of the time, and one that computes more lacks it
longer. So that time is compared with the processor time: a host is the reason only where the two have another ratio
than on the other ranks. Where waiting for other ranks is a part of its own, a rank had no processor while the passes of
a step took longer than the processor time of the step, which is known for each step. The kernel counts how long the
thread was ready and did not run, also where it waited for data or other ranks and could go on; that is known as a mean
between two reports. The longer of the two counts, elsewhere the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from .parts import Part
from .recorder import StepRecord
from .records import file_name, read_now

STEPS = 16
"""Steps that are compared."""
REPORTED_STEPS = 28
"""Steps in a report: ranks report at different moments, and STEPS of them must be in the reports of all."""
_FEWEST_STEPS = 10
_LEFT_OUT = 2
_SHARE, _SECONDS = 0.15, 0.002
"""Of a rank's own time, and at least."""
_SHARE_OF_PASSES = 0.25
_SLOW_STEPS = 0.75
_SECONDS_WITHOUT, _STEPS_OF_A_MEAN = 0.001, 2
"""Without a processor: at least, and steps of which a mean is taken. The scheduler takes a processor away for some
milliseconds at once, so that a short step loses that or nothing: every other step may lose it."""
_LACKING, _TIMES_LACKING = 0.3, 1.5
"""Without a processor for so many seconds, for each of processor time, beyond so many times those of other ranks."""
_COMPUTE = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
_TICK = 1e-5
"""Seconds of the numbers in a report."""
_IN_A_ROW, _IN_A_ROW_OF_MEANS = {"data": 1, "compute": 1, "host": 2}, 3
"""Checks that must agree. A mean between two reports says less than the steps themselves."""
_IN_A_ROW_OF_ANOTHER_PART = 10
"""Checks that must agree before a rank that is named is named again, with another part: they may alternate."""
_REPEAT_CHECKS = 20
"""Checks without a finding after which a rank counts as recovered."""


@dataclass(frozen=True)
class Recent:
    """The latest steps of a rank.

    Attributes:
        host: its machine.
        device: its device.
        step: number of the last of the steps.
        own: for each of them, seconds of data, of computation and of other code of the loop.
        held: for each of them, seconds of computation in which the thread had no processor.
        queued: mean seconds of a step in which its thread was ready to run and had no processor; 0 if unknown.
        held_is_mean: whether ``held`` is that mean, because it is not known for each step.
    """

    host: str
    device: str
    step: int
    own: Sequence[tuple[float, float, float]]
    held: Sequence[float]
    queued: float = 0.0
    held_is_mean: bool = False

    @cached_property
    def parts(self) -> tuple[float, ...]:
        """Mean seconds of data, of computation and of other code."""
        return tuple(_trimmed([row[index] for row in self.own]) for index in range(3))

    @cached_property
    def lacking(self) -> float:
        """Mean seconds without a processor."""
        return _trimmed(self.held)

    @property
    def ratio(self) -> float:
        """Seconds without a processor for each of computation."""
        return self.lacking / max(self.parts[1], _TICK)


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait.

    Attributes:
        rank: its number.
        host: its machine.
        device: its device.
        part: what is slow: "data", "compute" or "host" (a processor that others use, or other code of the loop).
        seconds: of a step, more than the other ranks.
        own: seconds of a step that the rank works itself.
        first: the first of the steps in which it was found.
        last: the last of them.
    """

    rank: int
    host: str
    device: str
    part: str
    seconds: float
    own: float
    first: int
    last: int

    def sentence(self) -> str:
        """Return what a person should know."""
        reasons = {
            "data": "waiting for its data",
            "compute": "its computation",
            "host": "its host: the processor is used by others, or code of the loop outside of the step takes long",
        }
        return (
            f"rank {self.rank} ({self.host}, {self.device}) makes the other ranks wait: it needs "
            f"{self.own * 1e3:.1f} ms per step, {self.seconds * 1e3:.1f} ms more than they do (steps {self.first} to "
            f"{self.last}). The reason is {reasons[self.part]}."
        )


class OwnParts(Enum):
    """Which parts of a step a rank is known to spend on its own work, without waiting for others."""

    ALL = "all"
    """Waiting is a part of its own."""
    COMPUTE = "compute"
    """Waiting is in the parts, but not in the processor time of the loop's thread."""
    DEVICE = "device"
    """Waiting is a part of its own, and a device has measured them."""
    DATA = "data"
    """Only the time for data: a device computes, and waits for others within the passes."""


def encode_recent(records: Sequence[StepRecord], own_parts: OwnParts, queued: Sequence[float]) -> dict[str, Any]:
    """Return the report of the latest steps, which follow each other.

    Args:
        records: the steps, at least one.
        own_parts: what is known of them.
        queued: for each of them, as in :class:`Recent`.
    """
    own: list[int] = []
    for record, of_step in zip(records, queued, strict=True):
        spent = record.seconds
        passes = sum(spent[part] for part in _COMPUTE)
        # On the CPU, a thread that waits for other ranks, or for a processor, does not run.
        compute = passes if own_parts is OwnParts.DEVICE else min(passes, record.ran)
        if own_parts is OwnParts.ALL:
            held = max(passes - compute, of_step)
        else:
            held = 0.0 if own_parts is OwnParts.DEVICE else queued[-1]
        values = (
            spent[Part.DATA],
            0.0 if own_parts is OwnParts.DATA else compute,
            spent[Part.OTHER] if own_parts in (OwnParts.ALL, OwnParts.DEVICE) else 0.0,
            held,
        )
        own += [round(value / _TICK) for value in values]
    is_mean = own_parts in (OwnParts.COMPUTE, OwnParts.DATA)
    return {"last": records[-1].step, "own": own, "queued": round(queued[-1], 6), "held_is_mean": is_mean}


def decode_recent(line: Mapping[str, Any]) -> Recent | None:
    """Return the report in a line of a ``.now`` file; None if there is none, or it is not readable."""
    try:
        recent, own = line["recent"], [value * _TICK for value in line["recent"]["own"]]
        rows = list(zip(own[0::4], own[1::4], own[2::4], strict=True))
        if len(own) != 4 * len(rows):
            return None
        identity = str(line["host"]), str(line["device"]), int(recent["last"])
        return Recent(*identity, rows, own[3::4], float(recent["queued"]), bool(recent["held_is_mean"]))
    except (KeyError, TypeError, ValueError):
        return None


def find_straggler(ranks: Mapping[int, Recent]) -> Straggler | None:
    """Return the rank for which the others wait, if there is one.

    Args:
        ranks: the latest steps by rank; those of one group of ranks that synchronise in every step.
    """
    steps = _common_steps(ranks) if len(ranks) > 1 else None
    if steps is None:
        return None
    found = _works_longer(steps) or _lacks_processor(steps)
    if found is None:
        return None
    rank, part, excess, own = found
    slow = steps[rank]
    return Straggler(rank, slow.host, slow.device, part, excess, own, slow.step - len(slow.own) + 1, slow.step)


def _common_steps(ranks: Mapping[int, Recent]) -> dict[int, Recent] | None:
    """Return the steps that all ranks have reported; None if there are too few."""
    last = min(recent.step for recent in ranks.values())
    first = max(max(recent.step - len(recent.own) + 1 for recent in ranks.values()), last - STEPS + 1)
    count = last - first + 1
    if count < _FEWEST_STEPS:
        return None
    steps = {}
    for rank, recent in ranks.items():
        begin = first - (recent.step - len(recent.own) + 1)
        own, held = recent.own[begin : begin + count], recent.held[begin : begin + count]
        steps[rank] = replace(recent, step=last, own=own, held=held)
    return steps


def _works_longer(steps: Mapping[int, Recent]) -> tuple[int, str, float, float] | None:
    """Return the rank that computes longest: rank, part, seconds more than the others, and seconds in all."""
    totals = {rank: [sum(row) for row in of_rank.own] for rank, of_rank in steps.items()}
    slowest = max(totals, key=lambda rank: statistics.median(totals[rank]))
    others = [rank for rank in steps if rank != slowest]
    typical = (statistics.median(column) for column in zip(*(totals[rank] for rank in others), strict=True))
    own = statistics.fmean(totals[slowest])
    usual = statistics.median(steps[rank].ratio for rank in others) if steps[slowest].parts[1] else 0.0
    threshold = max(_SECONDS, _SHARE * _caution(usual) * own)
    excess = _clear_excess([mine - other for mine, other in zip(totals[slowest], typical, strict=True)], threshold)
    return None if excess is None else (slowest, _largest_part(steps, slowest, others), excess, own)


def _lacks_processor(steps: Mapping[int, Recent]) -> tuple[int, str, float, float] | None:
    """Return the rank that lacks a processor more often than the others, with the values of :func:`_works_longer`."""
    usual = statistics.median_low(of_rank.ratio for of_rank in steps.values())
    slowest = max(steps, key=lambda rank: steps[rank].lacking - usual * steps[rank].parts[1])
    mine, others = steps[slowest], [of_rank for rank, of_rank in steps.items() if rank != slowest]
    usual = statistics.median(of_rank.ratio for of_rank in others)
    if mine.ratio < _TIMES_LACKING * usual + _LACKING:
        return None
    own = sum(mine.parts) + mine.lacking
    # Where the processor time is unknown, only the time without a processor can be compared.
    extra = statistics.median(of_rank.lacking for of_rank in others) if not mine.parts[1] else 0.0
    differences = [held - usual * row[1] - extra for held, row in zip(mine.held, mine.own, strict=True)]
    threshold = _SHARE_OF_PASSES * _caution(usual) ** 2 * (mine.parts[1] + mine.lacking)
    excess = _clear_excess(differences, max(_SECONDS_WITHOUT, threshold), _STEPS_OF_A_MEAN)
    return None if excess is None else (slowest, "host", excess, own)


def _caution(ratio: float) -> float:
    """Return the tolerance where ranks lack a processor: shared caches and cores make processor time vary."""
    return 1.0 + min(1.0, ratio)


def _clear_excess(differences: Sequence[float], threshold: float, of_a_mean: int = 1) -> float | None:
    """Return the mean of differences, without the smallest and the largest, if it is above a threshold and no chance.

    Args:
        differences: of steps that follow each other.
        threshold: for the mean; three quarters of the steps must have half of it.
        of_a_mean: so many steps count as one, with their mean.
    """
    mean = _trimmed(differences)
    begins = range(len(differences) % of_a_mean, len(differences), of_a_mean)
    means = [statistics.fmean(differences[begin : begin + of_a_mean]) for begin in begins]
    slow = sum(of_steps > threshold / 2 for of_steps in means)
    return mean if mean >= threshold and slow >= _SLOW_STEPS * len(means) else None


def _trimmed(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest values."""
    return statistics.fmean(sorted(values)[_LEFT_OUT : len(values) - _LEFT_OUT])


def _largest_part(steps: Mapping[int, Recent], slowest: int, others: Sequence[int]) -> str:
    """Return the part of a step by which a rank exceeds the others most."""
    mine = steps[slowest]
    more = [mine.parts[part] - statistics.median(steps[rank].parts[part] for rank in others) for part in range(3)]
    # Without a processor, reading data takes longer, too.
    usual = statistics.median(steps[rank].ratio for rank in others) if mine.parts[1] else 0.0
    queued = mine.queued - statistics.median(steps[rank].queued for rank in others)
    if mine.held_is_mean:
        by_host = min(queued, mine.queued - usual * mine.parts[1])
    else:
        by_host = min(queued, mine.parts[0] * (1 - (1 + usual) / (1 + mine.ratio)))
    by_host = min(max(0.0, by_host), max(0.0, more[0]))
    more[0] -= by_host
    more[2] += by_host
    return ("data", "compute", "host")[more.index(max(more))]


class Watch:
    """Compares the reports of the ranks of one replica, again and again.

    Reports of processes before this one are recognised by what they hold: they do not change. Clocks are not compared.

    Args:
        folder: the directory of the run's files.
        replica: of this process; None without replica groups.
        world_size: number of ranks.
    """

    def __init__(self, folder: Path, replica: int | None, world_size: int) -> None:
        self.files: list[Path] = [folder / f"{file_name(replica, rank)}.now" for rank in range(world_size)]
        self.named: Straggler | None = None
        self._first: dict[int, Any] = {}
        self._moved: set[int] = set()
        self._since_found = 0
        self._suspect: tuple[int, str] | None = None
        self._in_a_row = 0

    def check(self) -> Straggler | None:
        """Return a rank that others wait for and that was not named before.

        :attr:`named` is None again when it has recovered.
        """
        ranks = {}
        for rank, file in enumerate(self.files):
            line = read_now(file)
            recent = None if line is None else decode_recent(line)
            if line is None or recent is None:
                continue
            if rank not in self._moved:
                report = (line["id"], recent.step)
                if self._first.setdefault(rank, report) == report:
                    continue
                self._moved.add(rank)
            ranks[rank] = recent
        found = find_straggler(ranks) if len(ranks) == len(self.files) else None
        if found is None:
            self._since_found += 1
            self._in_a_row = 0
            if self._since_found >= _REPEAT_CHECKS:
                self.named = None
            return None
        self._since_found = 0
        suspect = (found.rank, found.part)
        self._in_a_row = self._in_a_row + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        before = self.named
        by_means = found.part == "host" and any(recent.held_is_mean for recent in ranks.values())
        needed = _IN_A_ROW_OF_MEANS if by_means else _IN_A_ROW[found.part]
        if before is not None and before.rank == found.rank and before.part != found.part:
            needed = _IN_A_ROW_OF_ANOTHER_PART
        if self._in_a_row < needed:
            return None
        self.named = found
        return found if before is None or (before.rank, before.part) != suspect else None
