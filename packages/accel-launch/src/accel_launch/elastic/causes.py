"""Why the ranks of a machine ended, as reported to the other machines. Torch-free."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from ..network.records import ECHO, INTERRUPTED, KILLED, RAISED, STOPPED, Cause
from .report import RankFailure, describe, first_failure, is_echo, signal_name


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
