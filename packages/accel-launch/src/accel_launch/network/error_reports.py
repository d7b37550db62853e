"""A launcher that cannot start tells those of the other machines why, so that they do not wait for it. Torch-free."""

from __future__ import annotations

import contextlib
import socket

from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution
from accel_state.options.resources import MachineRange
from accel_state.ports import DEFAULT_PORT

from ..launch_context import Role, detect_context, with_node
from .records import RAISED, Cause, State

# The others may start a little later than this one.
_SECONDS = 10.0


def report_to_peers(settings: Resolution, error: ConfigurationError) -> None:
    """Report an error to the launchers of the other machines, if there are any."""
    place = None if settings["dry_run"] else _place(settings)
    if place is not None:
        with contextlib.suppress(OSError, ConfigurationError):
            _tell(*place, str(error).split("\n", 1)[0])


def _place(settings: Resolution) -> tuple[str, int, int, int] | None:
    """Return the main address and port, rank of this machine and number of machines.

    None if no other launcher would listen.
    """
    try:
        context = detect_context(settings, all_variables())
        settings = with_node(settings, context)
    except ConfigurationError:
        return None
    names = ("num_machines", "main_process_ip", "main_process_port", "machine_rank")
    count, host, port, rank = (settings[name] for name in names)
    others = context.role in (Role.ALONE, Role.NODE) and count > 1 and host and 0 <= rank < count
    # The hostfiles of mpirun and DeepSpeed mean that one launcher starts all machines.
    # A machine of a range that cannot start is none of those that come.
    told = settings["rdzv_backend"] == "static" and not isinstance(count, MachineRange)
    told = told and not (settings["ft"] or settings["mpirun_hostfile"])
    starts_all = settings["use_deepspeed"] and settings["deepspeed_multinode_launcher"] not in (None, "standard")
    return (host, port or DEFAULT_PORT, rank, count) if others and told and not starts_all else None


def _tell(host: str, port: int, rank: int, count: int, text: str) -> None:
    from .board import Hub, join, say

    socket.getaddrinfo(host, port)  # an unknown host is an error that no other machine can be told
    say(f"this machine cannot start; telling the others why, for up to {_SECONDS:.0f} s")
    board = join(host, port, rank, count)
    try:
        if isinstance(board, Hub):
            board.refuse(f"{board.me.named()}: {text}")
        else:
            board.post(state=State.FAILED, cause=Cause(RAISED, text, 2))
            board.wait(lambda: board.refusal is not None, _SECONDS)
    finally:
        board.close(_SECONDS)
