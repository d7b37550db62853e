"""Ports of this machine."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

_IN_USE = (errno.EADDRINUSE, errno.EACCES)
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port now.

    Args:
        host: address of this machine to listen on; empty means all of them.

    Raises:
        OSError: ``host`` cannot be resolved, or is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as server:
        # As servers do: a port in TIME_WAIT after a run that just ended is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError as error:
            if error.errno in _IN_USE:
                return False
            raise
    return True


def is_local(host: str) -> bool:
    """Whether an address, or a host's name, is this machine's."""
    try:
        return is_free(0, host)
    except OSError:
        return False


def wait_for_server(host: str, port: int, seconds: float, note: Callable[[str], None]) -> bool:
    """Wait until somebody listens on the port.

    Args:
        seconds: how long to wait.
        note: told, once, that this takes a while.

    Returns:
        Whether somebody does.
    """
    begin = time.monotonic()
    noted = False
    while (waited := time.monotonic() - begin) < seconds:
        try:
            with socket.create_connection((host, port), timeout=min(_CONNECT_SECONDS, seconds)):
                return True
        except OSError:
            time.sleep(_RETRY_SECONDS)
        if waited > _PATIENCE_SECONDS and not noted:
            noted = True
            note(f"waiting for the machine of rank 0 at {host}:{port} (up to {seconds:g} s)")
    return False
