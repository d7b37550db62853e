"""Finds and describes the rank that failed first. Torch-free."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accel_state.env import parse_flag_from_env

from ..network.records import ECHO, INTERRUPTED, KILLED, RAISED, STOPPED, Cause
from ..remedies import SIZE_MISMATCH, remedy
from .worker import RELAY_VARIABLE, write_line

FILE_NAME = "failure.json"
END_NAME = "ended.json"

# Errors of collectives after another rank has ended.
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|DistBackendError|DistNetworkError|CollectiveTimeoutError|gloo|nccl"
    r"|socket",
    re.IGNORECASE,
)
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended."""

    rank: int  # global rank
    local_rank: int  # rank on its machine
    pid: int  # process id
    exit_code: int  # as a shell shows it: 128 + N if signal N ended it
    signal: str = ""  # name of the signal that ended it, or empty
    time_ns: int | None = None  # when, by the rank's own report; None if it left none (killed, or not Python)
    traceback: str = ""  # text, or empty
    host: str = ""  # where it ran; empty for this machine
    hint: str = ""  # what may have caused it, or empty


def read_failure(rank: int, local_rank: int, pid: int, exit_code: int, directory: Path) -> RankFailure:
    """Combine a rank's exit code (-N for signal N) with the report that it left in its directory."""
    report = _read_report(directory / FILE_NAME, pid)
    if report is None:
        signal_text = signal_name(-exit_code) if exit_code < 0 else ""
        return RankFailure(rank, local_rank, pid, shell_exit_code(exit_code), signal_text)
    # The report says how the script ended; a crash of the process during shutdown afterwards does not matter.
    return RankFailure(
        rank,
        local_rank,
        pid,
        int(str(report["exit_code"])),
        time_ns=int(str(report["time_ns"])),
        traceback=str(report["traceback"]),
    )


def has_ended(pid: int, directory: Path) -> bool:
    """Return True if a rank's script has ended without an error."""
    return _read_report(directory / END_NAME, pid) is not None


def without_shutdown_crashes(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Return the failures, except deaths by a signal of processes that had reported the end of their script before.

    A script that leaves its process group open can crash while Python shuts down.
    """
    failures = list(failures)
    reported = {(failure.host, failure.pid) for failure in failures if failure.time_ns is not None}
    return [
        failure for failure in failures if failure.time_ns is not None or (failure.host, failure.pid) not in reported
    ]


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure that caused the others.

    In this order: Python exceptions by time, because they can crash other ranks in their collectives; ranks that were
    killed or crashed; lost connections, which follow from either; ranks that the launcher ended with SIGTERM.
    """

    def order(failure: RankFailure) -> tuple[int, int]:
        if failure.time_ns is None:
            return (3 if failure.signal == "SIGTERM" else 1), failure.rank
        return (0 if failure.traceback and not is_echo(failure) else 2), failure.time_ns

    return min(failures, key=order)


def is_echo(failure: RankFailure) -> bool:
    """Return True if a rank failed in a connection, and so perhaps because another rank had ended."""
    return bool(failure.traceback and _LOST_CONNECTION.search(_message(failure.traceback)))


def _message(traceback: str) -> str:
    """Return the last exception of a traceback and its message, without the lines of the program."""
    lines = traceback.rstrip().rpartition('\n  File "')[2].splitlines()
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("    "), lines[1:])) or lines[-1]


def with_hint(failure: RankFailure, succeeded: Sequence[int], world_size: int) -> RankFailure:
    """Add what the launcher knows about the cause of a failure.

    Args:
        failure: the first failure.
        succeeded: ranks whose scripts had ended without an error before; the failed one is among them if its process
            died afterwards.
        world_size: ranks over all machines.
    """
    aborted, message = failure.signal == "SIGABRT", _message(failure.traceback) if failure.traceback else ""
    if failure.rank in succeeded:
        hint = (
            f"the script of rank {failure.rank} had already ended, without an error: the process died while Python "
            "shut down, usually in a thread or a library that is still in use then. Close what the script leaves open: "
            "torch.distributed.destroy_process_group(), the workers of data loaders, connections."
        )
    elif succeeded and (aborted or _LOST_CONNECTION.search(message)):
        several = len(succeeded) > 1
        ranks = ", ".join(map(str, succeeded[:_SHOWN_RANKS])) + (", ..." if len(succeeded) > _SHOWN_RANKS else "")
        hint = (
            f"rank{'s' if several else ''} {ranks} had already ended, without an error, when rank {failure.rank} "
            f"failed in a collective that needs {'them' if several else 'it'}: a loop was left early or had fewer "
            "batches, or the collective is in a branch that only some ranks take. Every rank must take the same "
            "number of steps and reach the same collectives: prepare the data loaders, or use join_uneven_inputs."
        )
    elif world_size > 1 and aborted:
        hint = SIZE_MISMATCH
    elif world_size == 1 or not (hint := remedy(message)):
        return failure
    return replace(failure, hint=hint)


def describe(failure: RankFailure, world_size: int) -> str:
    """Rank, host and exit code, the traceback if there is one, and the hint."""
    where = f"local rank {failure.local_rank} on {failure.host or socket.gethostname()}, pid {failure.pid}"
    subject = f"accel launch: rank {failure.rank} of {world_size}"
    if failure.traceback:
        text = f"{subject} failed first ({where}), exit code {failure.exit_code}:\n{failure.traceback.rstrip()}"
        return f"{text}\naccel launch: {failure.hint}" if failure.hint else text
    if failure.signal:
        text = f"{subject} was ended by {failure.signal} ({where}), exit code {failure.exit_code}."
        return " ".join(filter(None, (text, remedy(failure.signal), failure.hint)))
    return f"{subject} ended first with exit code {failure.exit_code} ({where}). {failure.hint}".rstrip()


def announce(failure: RankFailure, world_size: int) -> None:
    """Print a failure to stderr, as text or as a marked line for the launcher that started this one."""
    sys.stdout.flush()
    if parse_flag_from_env(RELAY_VARIABLE):
        report = {key: value for key, value in asdict(failure).items() if key != "host" or value}
        write_line({**report, "world_size": world_size})
    else:
        print(describe(failure, world_size), file=sys.stderr, flush=True)


def shell_exit_code(exit_code: int) -> int:
    """128 + N for -N (ended by signal N), else the code itself."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_report(path: Path, pid: int) -> Mapping[str, object] | None:
    try:
        report: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # A failed child that the rank forked reports with its own pid; that is not how the rank ended.
    return report if report.get("pid") == pid else None


def cause_of(failures: Sequence[RankFailure], machine_rank: int, world_size: int, round: int) -> Cause | None:
    """Return the cause of the failure that came first on this machine; None if no rank failed."""
    if not failures:
        return None
    first = first_failure(failures)
    if first.time_ns is not None:
        kind = ECHO if is_echo(first) else RAISED
    else:
        kind = STOPPED if first.signal == "SIGTERM" else KILLED
    host = f"{socket.gethostname()} (machine rank {machine_rank})"
    text = describe(replace(first, host=host), world_size).removeprefix("accel launch: ")
    return Cause(kind, text, first.exit_code, round)


def interruption(number: int, machine_rank: int, round: int) -> Cause:
    """Return the cause for a launcher that a signal ends."""
    text = f"ended by {signal_name(number)} on {socket.gethostname()} (machine rank {machine_rank})"
    return Cause(INTERRUPTED, text, 128 + number, round)
