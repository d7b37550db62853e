"""Servers of the stores that agents and ranks use to find each other."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from datetime import timedelta
from socket import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from accel_state.ports import listen
from accel_state.tcp_store import serve_store

CALL_TIMEOUT = timedelta(seconds=60)
"""How long one call into a store may take."""


class ThreadStoreServer:
    """A server in a thread of this process."""

    def __init__(self, host: str, port: int) -> None:
        self._store: TCPStore | None = serve_store(host, port, CALL_TIMEOUT)
        self.port: int = int(self._store.port)

    def close(self) -> None:
        """Drop the store; the thread ends with the last reference to it."""
        self._store = None


class ForkedStoreServer:
    """A server in a process of its own, which ends with this one.

    A process that forks ranks must not have the server's thread: a rank that is forked while the thread holds a lock
    (of the name service, say) waits for it forever.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host or "localhost"
        # Bound here: a port in use fails here, and clients that connect before the server is ready wait.
        with listen(host, port) as listener:
            self.port: int = int(listener.getsockname()[1])
            reader, self._writer = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                self._serve(listener, reader)
            os.close(reader)

    def _serve(self, listener: socket, reader: int) -> None:
        try:
            gc.freeze()
            os.close(self._writer)
            signal.set_wakeup_fd(-1)
            for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            # Ctrl-C reaches every process of the terminal, but ranks need the store to end in order.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            store = TCPStore(
                self._host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=CALL_TIMEOUT,
                master_listen_fd=listener.detach(),
                use_libuv=False,  # cannot take a socket before torch 2.7
            )
            os.read(reader, 1)
            del store
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the process."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        os.close(self._writer)
        # Closing the pipe is not enough: forked ranks hold it too while they run.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


StoreServer = ThreadStoreServer | ForkedStoreServer


def serve(host: str, port: int, *, forks: bool) -> StoreServer:
    """Start a server.

    Args:
        host: address to listen at; empty for all.
        port: 0 for any free one.
        forks: whether this process forks ranks afterwards.
    """
    try:
        return ForkedStoreServer(host, port) if forks else ThreadStoreServer(host, port)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(f"a store cannot listen on port {port}: {error}") from error
