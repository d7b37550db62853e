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
    """A TCP port that nothing on this machine listens on.

    Taken from below the range that the kernel hands out for outgoing connections, where it has room: between this call
    and the moment the caller listens, no connection of another process can take it.
    """
    with _taken_port() as holder:
        return int(holder.getsockname()[1])


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port that :func:`get_free_port` gives to nobody else, in no process of this machine, until the context
    is left.

    A server listens on it all the same, if it sets SO_REUSEADDR, as servers do (torch's stores among them). Only Linux
    shares a port in this way: elsewhere it is merely free when the context is entered.
    """
    with _taken_port() as holder:
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            # Now and not before it was taken: whoever looks for a port is refused, and whoever was told of this one is
            # not.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def _taken_port() -> socket.socket:
    """A socket that is bound to a free port, and does not listen."""
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    # SystemRandom: the choice must not depend on, nor disturb, a seed that the user set.
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
        # Without SO_REUSEADDR: a port that somebody has reserved, or whose last connection is still closing, is not
        # free.
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
        # No Linux: IANA's range begins at 49152, but a system may use less; then the fallback decides.
        return _LOWEST_PORT
