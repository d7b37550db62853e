"""Ports of this machine."""

from __future__ import annotations

import errno
import socket
import time

from accel_state.ports import is_loopback

DEFAULT_PORT = 29500
"""Of the machine of rank 0, where launchers of several machines meet."""

_IN_USE = (errno.EADDRINUSE, errno.EACCES)
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port now, at one address of this machine, or (empty) at all of them."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as server:
        # Servers set this: a port in TIME_WAIT after a run that just ended is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError as error:
            if error.errno in _IN_USE:
                return False
            raise
    return True


def is_local(host: str) -> bool:
    """Whether a host name or address belongs to this machine."""
    try:
        return is_free(0, host)
    except OSError:
        return False


def listening_host(host: str) -> str:
    """The address at which a server listens that is reached under ``host``; empty for all addresses of this machine.

    It is that of ``host``, and so of one interface, except where that would keep other machines out: the address is
    translated on the way (containers), or this machine resolves its own name to a loopback address.
    """
    if is_loopback(host):
        return host
    return host if is_local(host) and not _resolves_to_loopback(host) else ""


def _resolves_to_loopback(host: str) -> bool:
    return is_loopback(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))


def wait_for_server(host: str, port: int, seconds: float) -> bool:
    """Wait up to ``seconds`` until a server listens on the port; return whether one does."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        try:
            with socket.create_connection((host, port), timeout=min(_CONNECT_SECONDS, seconds)):
                return True
        except OSError:
            time.sleep(_RETRY_SECONDS)
    return False
