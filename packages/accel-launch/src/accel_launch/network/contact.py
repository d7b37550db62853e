"""Joins the board of a run: listens at the main address on machine rank 0, and connects to it on the others."""

from __future__ import annotations

import socket
import sys
import uuid
from collections.abc import Mapping

from accel_state import run_token
from accel_state.env import read_str
from accel_state.errors import ConfigurationError

from ..ports import is_local, listening_host
from .board import HANDSHAKE_SECONDS, Board
from .hub import Hub
from .interfaces import addresses_here
from .member import Member
from .records import Machine

# Proves that a launcher of accel listens, but not whose it is: a run has a secret only if the user has set one.
_NO_TOKEN = b"accel launch without a token"


def say(text: str) -> None:
    """Print a line of the launcher."""
    print(f"accel launch: {text}", file=sys.stderr, flush=True)


def token_of_run() -> bytes:
    """The token of the run, if the user has set one."""
    return run_token.read_token() if read_str(run_token.VARIABLE) else _NO_TOKEN


def join(
    host: str,
    port: int,
    rank: int,
    count: int,
    *,
    local_processes: int = 1,
    facts: Mapping[str, str] | None = None,
    give_up_seconds: float = 0.0,
) -> Board:
    """The board of a run of several machines.

    Args:
        host: the main address.
        port: the main port.
        rank: of this machine.
        count: machines of the run.
        local_processes: ranks of this machine.
        facts: what the machines must agree on.
        give_up_seconds: when a silent machine is given up; 0 for never.

    Raises:
        ConfigurationError: this machine has rank 0 and cannot listen at the main address, or is not reached there.
    """
    token = token_of_run()
    me = Machine(rank, uuid.uuid4().hex, socket.gethostname(), local_processes, facts=dict(facts or {}))
    if rank:
        return Member(me, (host, port), token, give_up_seconds, say)
    try:
        hub = Hub(me, listening_host(host), port, token, count, give_up_seconds, say)
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_port {port}: the launcher cannot listen there: {error.strerror or error}. Give another "
            "port, on all machines."
        ) from None
    try:
        _check_main_address(hub, host, port, token)
    except BaseException:
        hub.close(0)
        raise
    return hub


def _check_main_address(hub: Hub, host: str, port: int, token: bytes) -> None:
    """Check that this machine, which has rank 0, is reached under the main address, which may be translated."""
    if is_local(host):
        return
    try:
        run_token.connect((host, port), token, HANDSHAKE_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_ip {host} does not lead to this machine, which has --machine_rank 0: "
            f"{error.strerror or error}. The addresses of this machine ({socket.gethostname()}) are "
            f"{', '.join(addresses_here()) or 'unknown'}. Give one of them, on all machines, or give rank 0 to the "
            f"machine of {host}."
        ) from None
