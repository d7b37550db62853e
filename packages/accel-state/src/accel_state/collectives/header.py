"""Finds ranks that call a collective with different inputs, before their data is exchanged.

Backends do not compare the inputs of ranks: data of the same size is misread, and other sizes abort the process. Ranks
therefore exchange a header of a fixed size with a digest of the call first. All headers have the same size, so headers
of different operations fit together.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .diagnosis import caller_location

WIDTH = 64  # int64 values in a header; one message of 512 bytes takes as long as one of 8
FIRST_CALLS = 32
TIME_SHARE = 0.01
_MAX_INTERVAL = 1000
_SHOWN_TENSORS = 8
_SHOWN_TEXT = 1000


class Schedule:
    """Which calls of a process group exchange a header: the first ones, then as many as 1% of the run time allows.

    Ranks must agree on that without a message, also when they call from different lines of code. They have made the
    same number of calls, and compute the distance to the next header from values that each header carries.

    Args:
        host: whether the group communicates through host memory. Elsewhere the header waits for the device's queue.
    """

    def __init__(self, host: bool) -> None:
        self.host = host
        self.calls: int = 0
        self.next: int = 1
        self.cost: float = 0.0  # microseconds of a header, averaged
        self.duration: int = 0  # microseconds of this rank's latest header
        self.last_header: tuple[int, float] = (0, 0.0)  # calls and time
        self.lengths: dict[int, list[int]] = {}  # greatest lengths of ragged tensors, by the digest of their call

    def is_due(self) -> bool:
        """Count a call; whether it exchanges a header."""
        self.calls += 1
        return self.calls >= self.next

    def measurements(self) -> tuple[int, int]:
        """Microseconds of the previous header, and of a call since then."""
        calls, then = self.last_header
        now = time.perf_counter()
        self.last_header = (self.calls, now)
        return self.duration, int((now - then) * 1e6 / (self.calls - calls))

    def plan(self, rows: Sequence[Sequence[int]], seconds: float) -> None:
        """Choose the next call with a header.

        Args:
            rows: every rank's measurements.
            seconds: duration of this header.
        """
        self.duration = int(seconds * 1e6)
        # The rank that arrives last waits for the message alone; the others wait as they would in the collective. On a
        # device every rank waits for its queue, which the collective itself would not do.
        latest = (min if self.host else max)(row[0] for row in rows)
        self.cost = self.cost + (latest - self.cost) / 8 if self.cost else latest
        interval = math.ceil(self.cost / (TIME_SHARE * max(rows[0][1], 1)))
        self.next = self.calls + (1 if self.calls < FIRST_CALLS else max(1, min(interval, _MAX_INTERVAL)))


_schedules: WeakKeyDictionary[dist.ProcessGroup, Schedule] = WeakKeyDictionary()


def schedule_of(group: dist.ProcessGroup, host: bool) -> Schedule | None:
    """Return the schedule of a process group, shared by all objects that use the group; None for torch's fake group."""
    if dist.get_backend(group) == "fake":
        return None
    return _schedules.setdefault(group, Schedule(host))


def known_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that still exist of those that :func:`schedule_of` was asked for."""
    return list(_schedules)


@dataclass
class Call:
    """What all ranks must have in common in a call of a collective.

    Args:
        operation: its name.
        options: arguments other than the data, as text.
        inputs: for each tensor its place in the nested data, and its dtype and shape, as text.
        shapes: returns the nested data with shapes instead of tensors.
    """

    operation: str
    options: str = ""
    inputs: Sequence[tuple[str, str]] = ()
    shapes: Callable[[], Any] = list

    def __post_init__(self) -> None:
        text = repr((self.operation, self.options, *self.inputs))
        # An integer that is equal for equal calls, also in other processes.
        self.digest: int = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def report(self) -> Report:
        """Return the call in a form that can be sent to the other ranks."""
        return Report(
            self.operation, self.options, list(self.inputs), str(self.shapes())[:_SHOWN_TEXT], caller_location()
        )


class Report(NamedTuple):
    """A call as it is sent to the other ranks when calls differ."""

    operation: str
    options: str
    inputs: list[tuple[str, str]]
    shapes: str
    location: str


OBJECT_CALL = Call("all_gather_object")


def explain_mismatch(reports: Sequence[Report]) -> str:
    """Return the message for calls that differ: each rank's operation, shapes and location, and what to do."""

    def differ(part: Callable[[Report], object]) -> bool:
        return any(part(report) != part(reports[0]) for report in reports)

    def each(text: Callable[[Report], str]) -> list[str]:
        return [f"  - Process {rank}: {text(report)}" for rank, report in enumerate(reports)]

    title = "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
    advice = "If only a length differs, pad with `pad_across_processes` first; `gather_object` collects any shapes."
    subject = [f"Operation: `{reports[0].operation}`"]
    if differ(lambda report: report.operation):
        title = "Cannot apply desired operation: the ranks called different operations."
        subject = ["Operations:", *each(lambda report: f"`{report.operation}`")]
        advice = "Every rank must call the same collectives in the same order."
    elif differ(lambda report: report.options):
        title = "Cannot apply desired operation: the arguments of the ranks differ."
        advice = "Pass the same arguments on every rank."
        subject += ["Arguments:", *each(lambda report: report.options)]
    elif differ(lambda report: [place for place, _ in report.inputs]):
        title = "Cannot apply desired operation: the structures of the ranks differ."
        advice = "Pass the same number of tensors on every rank, under the same keys in the same order."
    elif not differ(lambda report: [text.partition("[")[2] or text for _, text in report.inputs]):
        title = "Cannot apply desired operation: the dtypes of the ranks differ."
        advice = "Convert the tensors to the same dtype on every rank."
    if differ(lambda report: report.location):
        advice += " The ranks are at different lines: check that none leaves a loop early."
    lines = [title, "", *subject, "Input shapes:", *each(lambda report: report.shapes), "Called with:"]
    lines += each(lambda report: f"{_differences(report, reports)} at {report.location}")
    return "\n".join([*lines, advice, "To check every call, run with --debug or ACCELERATE_DEBUG_MODE=1."])


def _differences(report: Report, everyone: Sequence[Report]) -> str:
    """Return the inputs of a call; of many tensors the first that differ between ranks."""
    inputs = report.inputs
    if len(inputs) > _SHOWN_TENSORS:
        inputs = [one for i, one in enumerate(inputs) if any(other.inputs[i : i + 1] != [one] for other in everyone)]
    shown = [f"{place}: {text}" if place else text for place, text in inputs[:_SHOWN_TENSORS]]
    more = len(inputs) - len(shown)
    return (", ".join(shown) or "no tensors") + (f" and {more} more" if more else "")
