"""Ports of this machine."""

from __future__ import annotations

import socket


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port now.

    Args:
        host: address of this machine to listen on; empty means all of them.

    Raises:
        OSError: ``host`` cannot be resolved, or is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
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


def _in_use_codes() -> frozenset[int]:
    import errno

    return frozenset({errno.EADDRINUSE, errno.EACCES})


_IN_USE = _in_use_codes()
