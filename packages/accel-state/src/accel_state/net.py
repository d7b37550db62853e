"""TCP ports."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 20000


def get_free_port() -> int:
    """A TCP port that nothing on this machine listens on.

    Taken from below the range that the kernel hands out for outgoing connections, where it has room: between this call and the
    moment the caller listens, no connection of another process can take it.
    """
    candidates = range(_LOWEST_PORT, _first_ephemeral_port())
    # SystemRandom: the choice must not depend on, nor disturb, a seed that the user set.
    generator = random.SystemRandom()
    for _ in range(64 if candidates else 0):
        port = generator.choice(candidates)
        if _can_listen(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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


def _can_listen(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a server does, so that a port whose last connection is still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
