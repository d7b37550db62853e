"""Finds the rank for which the others wait. Torch-free.

Ranks synchronise in every step, so that all steps take the same time: what counts is a rank's own time, the time of a
step without waiting. Each rank reports it for its latest steps (``recent`` in its ``.now`` file), and the reporter of
rank 0 compares them. No rank communicates for it.

A rank is named when its own time exceeds the median of the other ranks in the steps that all of them report, by a share
of the step, in most of the steps. The largest and smallest differences are left out, so that a few interruptions do not
count; a rank that is slow in one step of four is not named. The part that exceeds most is the reason.

A processor that others use shows in two ways. Where waiting for other ranks is a part of its own, the passes of a step
take longer than the processor time of the step, which is known for each step. Elsewhere, and for the time that is spent
on data, the kernel's count of how long the thread was ready and did not run is used, which is known as a mean between
two reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
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
_SLOW_STEPS = 0.6
_COMPUTE = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
_TICK = 1e-5
"""Seconds of the numbers in a report."""
_IN_A_ROW, _IN_A_ROW_OF_MEANS = {"data": 1, "compute": 1, "host": 2}, 3
"""Checks that must agree. A mean between two reports says less than the steps themselves."""
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
        """What a person should know."""
        reasons = {
            "data": "waiting for its data",
            "compute": "its computation",
            "host": "its host: the processor is used by others, or code of the loop outside of the step takes long",
        }
        return (
            f"rank {self.rank} ({self.host}, {self.device}) makes the other ranks wait: it needs "
            f"{self.own * 1e3:.1f} ms a step, {self.seconds * 1e3:.1f} ms more than they do (steps {self.first} to "
            f"{self.last}). The reason is {reasons[self.part]}."
        )


class OwnParts(Enum):
    """Which parts of a step a rank is known to spend on its own work, without waiting for others."""

    ALL = "all"
    """Waiting is a part of its own."""
    COMPUTE = "compute"
    """Waiting is in the parts, but not in the processor time of the loop's thread."""
    DATA = "data"
    """Only the time for data: a device computes."""


def encode_recent(records: Sequence[StepRecord], own_parts: OwnParts, queued: float) -> dict[str, Any]:
    """The report of the latest steps, which follow each other; ``queued`` as in :class:`Recent`."""
    own: list[int] = []
    for before, after in pairwise(records):
        spent = [max(0.0, late - early) for late, early in zip(after.seconds, before.seconds, strict=True)]
        # A thread that waits for other ranks, or for a processor, does not run.
        passes = sum(spent[part] for part in _COMPUTE)
        compute = min(passes, after.ran - before.ran)
        values = (
            spent[Part.DATA],
            0.0 if own_parts is OwnParts.DATA else compute,
            spent[Part.OTHER] if own_parts is OwnParts.ALL else 0.0,
            passes - compute if own_parts is OwnParts.ALL else queued,
        )
        own += [round(value / _TICK) for value in values]
    mean = own_parts is not OwnParts.ALL
    return {"last": records[-1].step, "own": own, "queued": round(queued, 6), "held_is_mean": mean}


def decode_recent(line: Mapping[str, Any]) -> Recent | None:
    """The report in a line of a ``.now`` file; None if there is none, or it is not readable."""
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
    """The rank for which the others wait, if there is one.

    Args:
        ranks: the latest steps by rank; those of one group of ranks that synchronise in every step.
    """
    if len(ranks) < 2:
        return None
    last = min(recent.step for recent in ranks.values())
    first = max(max(recent.step - len(recent.own) + 1 for recent in ranks.values()), last - STEPS + 1)
    count = last - first + 1
    if count < _FEWEST_STEPS:
        return None
    begins = {rank: first - (recent.step - len(recent.own) + 1) for rank, recent in ranks.items()}
    rows = {rank: list(recent.own)[begins[rank] :][:count] for rank, recent in ranks.items()}
    waits = {rank: list(recent.held)[begins[rank] :][:count] for rank, recent in ranks.items()}
    # First without the time in which a thread had no processor, which is noisy.
    for with_waits in (0, 1):
        totals = {
            rank: [sum(row) + with_waits * wait for row, wait in zip(of_rank, waits[rank], strict=True)]
            for rank, of_rank in rows.items()
        }
        slowest = max(totals, key=lambda rank: statistics.median(totals[rank]))
        others = [rank for rank in ranks if rank != slowest]
        typical = [statistics.median(totals[rank][step] for rank in others) for step in range(count)]
        differences = [mine - other for mine, other in zip(totals[slowest], typical, strict=True)]
        excess, own = _trimmed(differences), statistics.fmean(totals[slowest])
        threshold = max(_SECONDS, _SHARE * own)
        slow_steps = sum(difference > threshold / 2 for difference in differences)
        if excess >= threshold and slow_steps >= _SLOW_STEPS * count:
            recent = ranks[slowest]
            queued = recent.queued - statistics.median(ranks[rank].queued for rank in others)
            # Without a processor, reading data takes longer, too.
            part = "host" if with_waits or queued > excess / 2 else _largest(rows, slowest, others)
            return Straggler(slowest, recent.host, recent.device, part, excess, own, first, last)
    return None


def _trimmed(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest values."""
    return statistics.fmean(sorted(values)[_LEFT_OUT : len(values) - _LEFT_OUT])


def _largest(rows: Mapping[int, Sequence[tuple[float, float, float]]], slowest: int, others: Sequence[int]) -> str:
    """The part of a step by which a rank exceeds the others most."""
    columns = {}
    for index, name in enumerate(("data", "compute", "host")):
        typical = statistics.median(statistics.fmean(row[index] for row in rows[rank]) for rank in others)
        columns[name] = statistics.fmean(row[index] for row in rows[slowest]) - typical
    return max(columns, key=columns.__getitem__)


class Watch:
    """Compares the reports of the ranks of one replica, again and again.

    Reports of processes before this one are recognised by what they hold: they do not change. Clocks are not compared.

    Args:
        folder: the directory of the run's files.
        replica: of this process; None without replica groups.
        world_size: number of ranks.
    """

    def __init__(self, folder: Path, replica: int | None, world_size: int) -> None:
        self.files = [folder / f"{file_name(replica, rank)}.now" for rank in range(world_size)]
        self.named: Straggler | None = None
        self._first: dict[int, Any] = {}
        self._moved: set[int] = set()
        self._since_found = 0
        self._suspect: tuple[int, str] | None = None
        self._in_a_row = 0

    def check(self) -> Straggler | None:
        """A rank that others wait for and that was not named before.

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
        by_means = found.part == "host" and any(recent.held_is_mean for recent in ranks.values())
        if self._in_a_row < (_IN_A_ROW_OF_MEANS if by_means else _IN_A_ROW[found.part]):
            return None
        before, self.named = self.named, found
        return found if before is None or (before.rank, before.part) != suspect else None
