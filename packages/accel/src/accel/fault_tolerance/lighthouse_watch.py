"""Notices that the lighthouse has ended. torchft silently uses the next one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

_CONNECT_SECONDS = 5.0


class LighthouseWatch:
    """A connection to the lighthouse that carries nothing, and which ends with the lighthouse only.

    Args:
        address: URL of the lighthouse.
        on_end: called once for each end, in any thread.
    """

    def __init__(self, address: str, on_end: Callable[[], None]) -> None:
        url = urlsplit(address)
        self._address = url.hostname or "localhost", url.port or 80
        self._on_end = on_end
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Watch the lighthouse that has just answered, unless it is watched already."""
        if self._connection is None:
            try:
                connection = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
            except OSError:
                return  # it has ended again, or cannot be reached: the next step tries again
            connection.settimeout(None)
            self._connection = connection
            threading.Thread(target=self._wait, args=(connection,), name="accel lighthouse", daemon=True).start()

    def check(self) -> None:
        """Notice an end at once, of which the other thread has not heard yet."""
        connection = self._connection
        if connection is not None:
            try:
                ended = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # a reset is an end, too
                ended = True
            if ended:
                self._note_end(connection)

    def close(self) -> None:
        """Cease to watch."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):  # the other side has just ended it
                connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, connection: socket.socket) -> None:
        with connection:
            with suppress(OSError):
                while connection.recv(1024):
                    pass
            self._note_end(connection)

    def _note_end(self, connection: socket.socket) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._on_end()
