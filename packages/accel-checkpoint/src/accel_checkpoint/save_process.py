"""Writes checkpoints in a process next to the rank, so that the training loop keeps its interpreter to itself.

The state is copied into memory that both processes map (:mod:`.shared_memory`). The process is started at the first
save in the background, which does not wait for it, and ends with the rank.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from accel_state import env, get_logger
from accel_state.errors import ConfigurationError
from accel_state.storage.url import RemotePath

from .manifest import FileRecord
from .names import CheckpointError
from .parts import Part
from .save_worker import Channel
from .shared_memory import SharedMemory, dumps

logger: Final = get_logger(__name__)

T = TypeVar("T")
# Takes the directory, the parts, the number of threads that sync files, and whether tensors may be on a device.
WriteParts = Callable[[Path, Sequence[Part], "int | None", bool], "dict[str, FileRecord]"]

# A smaller state is written by a thread sooner than a process starts.
MIN_BYTES = 8 << 20
# These are for the rank: a launcher and a terminal send them to all processes, and a save shall still end then.
_SIGNALS = {signal.SIGINT, signal.SIGTERM} | {
    getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
}


class UnknownHereError(Exception):
    """The process cannot read a state: it has objects of a class that only the rank's process knows."""


class SaveProcess:
    """A process that writes files of this rank."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        # It finds modules where this process does; what the script itself defines is not run again.
        path = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", f"{__package__}.save_worker", str(other.fileno()), str(os.getpid())]
        # The mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with other:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[other.fileno()],
                    env={**env.all_variables(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.connection = own
        self._channel = Channel(own)
        self._sent: dict[int, Any] = {}
        self._numbers = 0

    def call(self, memory: SharedMemory, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function there, and wait for its result or error.

        Args:
            memory: holds the tensors in the arguments.
            function: of a module.
            arguments: of the function.

        Raises:
            CheckpointError: the process was ended.
            UnknownHereError: it cannot read the arguments.
        """
        content = dumps((list(memory.segments), function, arguments), memory)
        try:
            for number, segment in memory.segments.items():
                if self._sent.get(number) is not segment:
                    self._channel.send(struct.pack("<QQ", number, segment.nbytes), (segment.descriptor,))
            self._sent = dict(memory.segments)
            self._channel.send(content)
            outcome, *details = pickle.loads(self._channel.receive()[0])
        except (EOFError, OSError) as error:
            raise CheckpointError(
                f"the process that writes the state ended in the middle (exit code {self._process.wait()}; -9 is "
                "usually the system, which was short of memory). An older checkpoint is unchanged, and the next save "
                "starts a new process."
            ) from error
        if outcome == "unknown":
            raise UnknownHereError(details[0])
        if outcome == "failed":
            raise details[0] from _TracebackError(details[1])
        result: T = details[0]
        return result

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if it can be called."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it, and wait for that."""
        self.connection.close()
        self._process.wait()


class _TracebackError(Exception):
    """Shows where an error of the other process was raised."""

    def __str__(self) -> str:
        return f"in the process that writes the state:\n{self.args[0]}"


def is_possible() -> bool:
    """Return True if processes can be started here that share memory with this one."""
    return bool(sys.executable) and hasattr(os, "memfd_create")


class ProcessHolder:
    """A process that is started when it is first called, and again when it has ended; it does one thing at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: SaveProcess | None = None
        _holders.add(self)

    @property
    def started(self) -> bool:
        """True if there is a process."""
        return self._process is not None

    def call(self, memory: SharedMemory, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function there; see :meth:`SaveProcess.call`."""
        with self._lock:
            if self._process is not None and not self._process.alive:
                self._process.stop()
                self._process = None
            if self._process is None:
                self._process = SaveProcess()
            return self._process.call(memory, function, *arguments)

    def stop(self) -> None:
        """End the process, if there is one; the next call starts another."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.stop()

    def forget(self) -> None:
        """In a forked process: the process belongs to its parent."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.connection.close()
            _of_parents.append(self._process)
            self._process = None


_holders: weakref.WeakSet[ProcessHolder] = weakref.WeakSet()
# Kept in forked processes, which cannot wait for a process that is not their child.
_of_parents: list[SaveProcess] = []
saves: ProcessHolder = ProcessHolder()
"""The process that writes this rank's files."""


@atexit.register
def _stop_all() -> None:
    for holder in list(_holders):
        holder.stop()


def _forget_all() -> None:
    for holder in list(_holders):
        holder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class ProcessWriter:
    """Writes the files of one save in another process.

    Args:
        memory: holds the copies of the state.
        write: writes files, in any process.
    """

    def __init__(self, memory: SharedMemory, write: WriteParts) -> None:
        self._memory, self._write = memory, write

    def write_parts(
        self, directory: Path, parts: Sequence[Part], workers: int | None, on_device: bool
    ) -> dict[str, FileRecord]:
        """Like :func:`.writer.write_parts`, which this thread calls if the process cannot read the state."""
        status = os.stat(directory)
        identity = status.st_dev, status.st_ino
        safe = torch.serialization.get_safe_globals()
        try:
            place = str(directory.absolute())
            return saves.call(self._memory, _write_parts, self._write, place, identity, parts, workers, safe)
        except UnknownHereError as error:
            logger.info("%s is written by a thread of the training process: %s", directory, error)
            return self._write(directory, parts, workers, on_device)

    def upload(self, place: RemotePath, pairs: Sequence[tuple[Path, str]]) -> None:
        """Like ``Store(place).upload(pairs)``."""
        if place.protocol == "memory":
            raise UnknownHereError("it is a store in the memory of this process")
        saves.call(self._memory, _upload, place, pairs)


def writer_for(memory: SharedMemory, write: WriteParts) -> ProcessWriter | None:
    """Return what writes a state of which this memory holds the copies.

    None if a thread of this process shall write it.
    """
    is_small = memory.used_bytes < MIN_BYTES and not saves.started
    if is_small or not memory.can_be_mapped or not is_possible():
        return None
    return ProcessWriter(memory, write)


def _write_parts(
    write: WriteParts,
    directory: str,
    identity: tuple[int, int],
    parts: Sequence[Part],
    workers: int | None,
    safe: list[Any],
) -> dict[str, FileRecord]:
    """In the other process: write files of a checkpoint; ``safe`` are the classes that the rank allows in them."""
    # A process that has outlived its rank for a moment must not write into the directory that the next run has made
    # under this name. The working directory stays the same one, whatever it is called.
    os.chdir(directory)
    try:
        status = os.stat(".")
        if (status.st_dev, status.st_ino) != identity:
            raise CheckpointError(f"{directory} was replaced while it was written. Is another program deleting it?")
        with torch.serialization.safe_globals(safe):
            return write(Path(), parts, workers, False)
    finally:
        os.chdir("/")


def _upload(place: RemotePath, pairs: Sequence[tuple[Path, str]]) -> None:
    """In the other process: send files of a checkpoint."""
    from accel_state.storage.store import Store

    try:
        store = Store(place)
    except ConfigurationError as error:
        raise UnknownHereError(str(error)) from error
    store.upload(pairs)
