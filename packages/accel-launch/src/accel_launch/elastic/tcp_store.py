"""Servers of the stores through which agents, and ranks, find one another."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from .checks import LOOPBACK

CALL_TIMEOUT = timedelta(seconds=60)
"""How long one call into a store may take."""


class Server(Protocol):
    """A store that others can reach."""

    port: int

    def client(self) -> TCPStore:
        """The store, for this process."""

    def close(self) -> None:
        """Let go of the store; whoever uses it loses the connection."""


class LocalServer:
    """A server in a thread of this process.

    Args:
        port: what it listens on; 0 for any free port.
    """

    def __init__(self, port: int) -> None:
        self._store: TCPStore | None = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=CALL_TIMEOUT
        )
        self.port = int(self._store.port)

    def client(self) -> TCPStore:
        """The store."""
        if self._store is None:
            raise ValueError("the store is closed.")
        return self._store

    def close(self) -> None:
        """End the thread, once nobody in this process holds the store."""
        self._store = None


class ForkedServer:
    """A server in a process of its own, which ends with this one.

    A process that forks its ranks must not have the server's thread: a rank forked while that thread holds a lock (of
    the system's name service, say) would wait for it for ever.

    Args:
        port: what it listens on; 0 for any free port.
    """

    def __init__(self, port: int) -> None:
        # Bound here, so that a port in use is an error here, and what connects before the other process is ready waits.
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN) as listener:
            self.port = int(listener.getsockname()[1])
            reader, self._writer = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                self._serve(listener, reader)
            os.close(reader)

    def _serve(self, listener: socket.socket, reader: int) -> None:
        try:
            gc.freeze()
            os.close(self._writer)
            signal.set_wakeup_fd(-1)
            for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            # Ctrl-C goes to every process of the terminal, and ranks that end in order still need the store.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            store = TCPStore(
                LOOPBACK,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=CALL_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
            os.read(reader, 1)
            del store
        finally:
            os._exit(0)

    def client(self) -> TCPStore:
        """A connection to the store."""
        return TCPStore(LOOPBACK, self.port, is_master=False, wait_for_workers=False, timeout=CALL_TIMEOUT)

    def close(self) -> None:
        """End the process."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        os.close(self._writer)
        # Closing the pipe alone does not do it: forked ranks hold it too, as long as they run.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def serve(port: int, *, forks: bool) -> Server:
    """Start a server.

    Args:
        port: what it listens on; 0 for any free port.
        forks: whether this process forks ranks afterwards.

    Raises:
        RendezvousConnectionError: the port is in use.
    """
    try:
        return ForkedServer(port) if forks else LocalServer(port)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(f"a store cannot listen on port {port}: {error}") from error
