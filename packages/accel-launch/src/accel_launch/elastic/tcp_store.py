"""The server of a store by which ranks find each other, where they are forks of the launcher."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from datetime import timedelta
from socket import socket

from torch.distributed import TCPStore

from accel_state.ports import listen

from ..supervisor import SIGNALS

CALL_TIMEOUT = timedelta(seconds=60)
"""How long one call into a store may take."""


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
            for number in SIGNALS:
                # Ctrl-C reaches every process of the terminal, but ranks need the store to end in order.
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
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
