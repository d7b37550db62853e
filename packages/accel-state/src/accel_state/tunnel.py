"""Tunnels to servers that cannot check a token themselves, between machines.

The server listens on the loopback address only. On its machine a :class:`TunnelServer` listens for other machines,
accepts those that have the token of the run (see :mod:`.run_token`), and forwards their bytes to the server. On the
other machines a :class:`TunnelClient` is what the clients connect to. The bytes are not encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from . import run_token
from .ports import LOOPBACK, listen

_CONNECT_SECONDS = 10.0
# So many connections may be about to prove that they have the token; further ones are closed at once.
_WAITING = 64
_PIECE = 1 << 16


class _Relay:
    """Accepts connections in a thread, and connects each to its target."""

    def __init__(self, host: str, port: int, name: str) -> None:
        self._listener = listen(host, port)
        self.port: int = int(self._listener.getsockname()[1])
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue  # the client has gone already
            if self._waiting.acquire(blocking=False):
                threading.Thread(target=self._begin, args=(connection,), name="accel tunnel", daemon=True).start()
            else:
                connection.close()

    def _begin(self, connection: socket.socket) -> None:
        target: socket.socket | None = None
        try:
            target = self._target(connection)
        except OSError:
            connection.close()
        finally:
            self._waiting.release()
        if target is None:
            return
        with self._lock:
            if self._is_closed:
                connection.close()
                target.close()
                return
            self._open |= {connection, target}
        for each in (connection, target):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pass_on, args=(target, connection), name="accel tunnel", daemon=True)
        back.start()
        _pass_on(connection, target)
        back.join()
        with self._lock:
            self._open -= {connection, target}
        connection.close()
        target.close()

    def _target(self, connection: socket.socket) -> socket.socket:
        """Connect to where the bytes of a connection go."""
        raise NotImplementedError

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake accept
        self._listener.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes in one direction until it ends. An error ends the other direction, too."""
    try:
        while data := source.recv(_PIECE):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class TunnelServer(_Relay):
    """Listens for clients on other machines.

    Args:
        host: the address to listen at; empty for all.
        port: 0 for any free one.
        server: port of the server, on the loopback address.
        token: of the run.
        refused: called with the address of a client that does not have it.
    """

    def __init__(
        self, host: str, port: int, server: int, token: bytes, refused: Callable[[str], None] = lambda _: None
    ) -> None:
        self._server, self._token, self._refused = server, token, refused
        super().__init__(host, port, "accel tunnel")

    def _target(self, connection: socket.socket) -> socket.socket:
        try:
            run_token.accept(connection, self._token, _CONNECT_SECONDS)
        except run_token.TokenError:
            with contextlib.suppress(OSError):
                self._refused(str(connection.getpeername()[0]))
            raise
        return socket.create_connection((LOOPBACK, self._server), _CONNECT_SECONDS)


class TunnelClient(_Relay):
    """Listens on the loopback address, at ``port``, for clients of a server on another machine.

    Args:
        address: host and port of the tunnel's server; may be changed, for connections from then on.
        token: of the run.
    """

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._token = token
        self.address: tuple[str, int] = address
        super().__init__(LOOPBACK, 0, "accel tunnel")

    def _target(self, connection: socket.socket) -> socket.socket:
        return run_token.connect(self.address, self._token, _CONNECT_SECONDS)
