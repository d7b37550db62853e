"""Says which rank failed first, and with what. Imports no torch."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "failure.json"

# What collectives say when another rank has gone.
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|DistBackendError|DistNetworkError|gloo|nccl|socket", re.IGNORECASE
)

_HINTS = {
    "SIGKILL": "Nothing but the system or a person sends it; mostly the system was out of memory (see `dmesg`).",
    "SIGSEGV": "It crashed in native code. PYTHONFAULTHANDLER=1 in the environment shows where.",
    "SIGBUS": "Often /dev/shm is full (data loader workers share batches there): enlarge it, or use fewer workers.",
    "SIGABRT": "Native code gave up; what it printed is above. PYTHONFAULTHANDLER=1 in the environment shows where.",
}


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended.

    Attributes:
        exit_code: as a shell shows it; 128 + N for a death by signal N.
        signal: name of the signal that ended it, or empty.
        time_ns: when, by the rank's own report; None where it left none (killed, or not Python).
        traceback: text, or empty.
        host: where it ran; empty for this machine.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    signal: str = ""
    time_ns: int | None = None
    traceback: str = ""
    host: str = ""


def read_failure(rank: int, local_rank: int, pid: int, exit_code: int, folder: Path) -> RankFailure:
    """Put together what the launcher saw of a rank and what the rank itself reported in its folder.

    Args:
        exit_code: as Python's subprocess gives it: -N for a death by signal N.
    """
    report = _read_report(folder / FILE_NAME, pid)
    if report is None:
        return RankFailure(
            rank, local_rank, pid, shell_exit_code(exit_code), signal_name(-exit_code) if exit_code < 0 else ""
        )
    # A report names what the script ended with. That it then also crashed while shutting down is of no interest.
    return RankFailure(
        rank,
        local_rank,
        pid,
        int(str(report["exit_code"])),
        time_ns=int(str(report["time_ns"])),
        traceback=str(report["traceback"]),
    )


def without_crashes_at_the_end(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """The failures, less each death by a signal of a process that had reported before what its script ended with.

    A script that ends with its process group open can crash while Python shuts down (a thread of the group asks for the
    interpreter).
    """
    failures = list(failures)
    reported = {(failure.host, failure.pid) for failure in failures if failure.time_ns is not None}
    return [
        failure for failure in failures if failure.time_ns is not None or (failure.host, failure.pid) not in reported
    ]


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that the others follow from.

    An error of Python's own comes first, by its time: a rank that it ends can make the others crash in their
    collectives. Then come ranks that were killed or crashed, and then errors that tell of a lost connection, which
    follow from either. Ranks that the launcher itself ended with SIGTERM come last.
    """

    def order(failure: RankFailure) -> tuple[int, int]:
        if failure.time_ns is not None:
            own = failure.traceback and not _LOST_CONNECTION.search(failure.traceback.rstrip().rpartition("\n")[2])
            return (0 if own else 2), failure.time_ns
        return (3 if failure.signal == "SIGTERM" else 1), failure.rank

    return min(failures, key=order)


def describe(failure: RankFailure, world_size: int) -> str:
    """The message for the screen: the rank with host and exit code, then its traceback, which ends the text."""
    where = f"local rank {failure.local_rank} on {failure.host or socket.gethostname()}, pid {failure.pid}"
    subject = f"rank {failure.rank} of {world_size}"
    if failure.traceback:
        return (
            f"accel launch: {subject} failed first ({where}), exit code "
            f"{failure.exit_code}:\n{failure.traceback.rstrip()}"
        )
    if failure.signal:
        hint = _HINTS.get(failure.signal, "")
        return (
            f"accel launch: {subject} was ended by {failure.signal} ({where}), exit code {failure.exit_code}. {hint}"
        ).rstrip()
    return f"accel launch: {subject} ended first with exit code {failure.exit_code} ({where})."


def shell_exit_code(exit_code: int) -> int:
    """128 + N for -N (a death by signal N), else the code itself."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """The name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_report(path: Path, pid: int) -> Mapping[str, object] | None:
    try:
        report: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # A child that the rank forked, and that failed, reports under a pid of its own: that is not how the rank ended.
    return report if report.get("pid") == pid else None
