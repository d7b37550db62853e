"""The process that writes checkpoints in the background, and runs next to one rank. See :mod:`.save_process`.

It ends with the rank, and never writes into another directory than the one that the rank has locked.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

# The length of a message, and the number of descriptors that come with it.
HEADER = struct.Struct("<QI")
_SECONDS_BETWEEN_LOOKS = 0.05
# Where processors are short, the training loop goes first, and a save still gets a quarter of one.
_NICENESS = 5


class Channel:
    """Messages to and from another process, with descriptors of files."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, content: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; raises OSError if the other process has ended."""
        header = HEADER.pack(len(content), len(descriptors))
        socket.send_fds(self.connection, [header], list(descriptors))
        self.connection.sendall(content)

    def receive(self) -> tuple[bytes, tuple[int, ...]]:
        """Return the next message; raises EOFError if the other process has ended."""
        header, descriptors, _, _ = socket.recv_fds(self.connection, HEADER.size, 1)
        header += self._exactly(HEADER.size - len(header))
        length, _ = HEADER.unpack(header)
        return self._exactly(length), tuple(descriptors)

    def _exactly(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            part = self.connection.recv(min(length - len(content), 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            content += part
        return bytes(content)


def main(descriptor: int, parent: int) -> None:
    """Do what is asked for, until the process that asks ends.

    Args:
        descriptor: of the socket to it.
        parent: its id.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(_NICENESS)
    channel = Channel(socket.socket(fileno=descriptor))
    segments: dict[int, Any] = {}
    while True:
        try:
            content, descriptors = channel.receive()
        except (EOFError, ConnectionError):
            return
        if descriptors:
            from .shared_memory import Segment

            number, nbytes = struct.unpack("<QQ", content)
            segments[number] = Segment(nbytes, descriptors[0])
            continue
        answer = _answer(content, segments)
        try:
            channel.send(answer)
        except ConnectionError:
            return


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, also in the middle of a file."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _answer(content: bytes, segments: dict[int, Any]) -> bytes:
    """Return what a request has led to: ("done", value), ("failed", error, traceback) or ("unknown", reason)."""
    from .shared_memory import loads

    try:
        # The rank's own process sends this, over a socket that no other has.
        kept, function, arguments = loads(content, segments)
    except Exception as error:
        return pickle.dumps(("unknown", f"{type(error).__name__}: {error}"))
    for number in set(segments) - set(kept):
        del segments[number]
    try:
        return pickle.dumps(("done", function(*arguments)))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            failed = pickle.dumps(("failed", error, trace))
            pickle.loads(failed)
        except Exception:  # of a class that cannot be copied to another process
            from .names import CheckpointError

            failed = pickle.dumps(("failed", CheckpointError(f"{type(error).__name__}: {error}"), trace))
        return failed


if __name__ == "__main__":
    # Under its own name, which the functions that are sent refer to.
    from accel_checkpoint.save_worker import main as run

    run(int(sys.argv[1]), int(sys.argv[2]))
