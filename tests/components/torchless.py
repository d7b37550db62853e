"""A process group without torch, whose import costs a rank two seconds: for tests of what starts the ranks.

It needs of a launcher what gloo needs: the rank, the size, and a main address at which to meet. Like gloo's, its
operations fail in the other ranks when one is lost. Standard library only: scripts import it from their own folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

_SECONDS = 150.0


def copy_to(folder: Path) -> None:
    """Put this module beside the scripts of a folder."""
    shutil.copy(__file__, folder)


class Group:
    """All ranks; rank 0 has a connection to each of the others."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        deadline = time.monotonic() + _SECONDS
        # At the main port of an agent its own store listens already; rank 0 tells another port in a file.
        file = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            socket.create_connection((host, port), _SECONDS).close()
            file = Path(f"port-of-{port}")
        if self.rank == 0:
            self._connections = self._accept(0 if file else port, file)
        else:
            self._connections = [self._connect(host, port, file, deadline)]

    def sum(self, value: int) -> int:
        """Small numbers of all ranks, added; a barrier too."""
        if self.rank == 0:
            value += sum(self._receive(connection) for connection in self._connections)
        for connection in self._connections:
            connection.sendall(bytes([value]))
        return value if self.rank == 0 else self._receive(self._connections[0])

    def _accept(self, port: int, file: Path | None) -> list[socket.socket]:
        with socket.create_server(("", port)) as server:
            if file is not None:
                part = file.with_suffix(".part")
                part.write_text(str(server.getsockname()[1]))
                part.replace(file)
            server.settimeout(_SECONDS)
            return [server.accept()[0] for _ in range(self.size - 1)]

    @staticmethod
    def _connect(host: str, port: int, file: Path | None, deadline: float) -> socket.socket:
        while True:
            try:
                # Read each time: the file may be that of a former start.
                return socket.create_connection((host, int(file.read_text()) if file else port), _SECONDS)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def _receive(connection: socket.socket) -> int:
        connection.settimeout(None)
        received = connection.recv(1)
        if not received:
            raise ConnectionResetError("Connection closed by peer")  # gloo's words, which a launcher knows
        return received[0]
