"""TCP ports."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above the ports that jobs of SLURM and MPI derive from their names.
_LOWEST_PORT = 25000


def get_free_port() -> int:
    """Find a TCP port that nothing on this machine listens on.

    It is below the ephemeral range if possible, so that no outgoing connection takes it before the caller listens.
    """
    with _taken_port() as holder:
        return int(holder.getsockname()[1])


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port on this machine: within the context, :func:`get_free_port` of no process returns it.

    A server that sets SO_REUSEADDR, as torch's stores do, can listen on it. This needs Linux; on other systems the
    port is only known to be free when the context is entered.
    """
    with _taken_port() as holder:
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            # After bind: a search for a free port, which binds without the option, fails; a server with it succeeds.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def _taken_port() -> socket.socket:
    """A socket bound to a free port that does not listen."""
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    # SystemRandom: independent of the seed that the user set.
    generator = random.SystemRandom()
    for _ in range(64 if candidates else 0):
        holder = _bound(generator.choice(candidates))
        if holder is not None:
            return holder
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind(("", 0))
    return holder


def _bound(port: int) -> socket.socket | None:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEADDR, so that bind fails on a reserved port, and on one whose last connection is closing.
        holder.bind(("", port))
    except OSError:
        holder.close()
        return None
    return holder


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something on this machine listens on a TCP port.

    Args:
        port: 29500, torch's default for the main process, when None.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(("localhost", 29500 if port is None else port)) == 0


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # Not Linux: the ephemeral range is unknown, so let the system choose a port.
        return _LOWEST_PORT
