"""Writing a checkpoint: its files are hashed while they are written, and synced while the next one is written."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from accel_state import PartialState, get_logger
from accel_state.paths import open_for_writing, refuse_link
from accel_state.storage.url import Location, RemotePath

from .atomic_dir import CheckpointDirectory, sync
from .catalog import rotate
from .manifest import BLOCK_BYTES, MANIFEST_FORMAT, FileRecord, Manifest, Workers, record_file
from .names import MANIFEST_NAME
from .parts import Part
from .remote.directory import RemoteDirectory, new_save_id
from .safe_load import check_readable
from .save_process import ProcessWriter, writer_for
from .shared_memory import SharedMemory
from .staging import on_host

logger = get_logger(__name__)

# Small pieces are written together.
_BUFFER_BYTES = 1 << 16

Consensus = Callable[[str], AbstractContextManager[None]]
"""Makes a block that every rank enters, and that fails on all ranks if it fails on one; takes what to say it does."""


class HashingFile:
    """A file to write to, whose blocks are hashed as they are written."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_for_writing(path)
        self._buffer = bytearray()
        self._size = 0
        self._digest = xxhash.xxh3_128()
        self._digests: list[str] = []
        self.error: BaseException | None = None
        """What went wrong while writing: torch replaces this error by one of its own."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._buffer += view if len(view) <= _BUFFER_BYTES else b""
        if len(view) > _BUFFER_BYTES or len(self._buffer) > _BUFFER_BYTES:
            self.flush()
        if len(view) > _BUFFER_BYTES:
            self._write_through(view)
        return len(view)

    def flush(self) -> None:
        buffered, self._buffer = self._buffer, bytearray()
        self._write_through(memoryview(buffered))

    def _write_through(self, view: memoryview) -> None:
        while view:
            try:
                written = view[: os.write(self._descriptor, view[:BLOCK_BYTES])]
            except BaseException as error:
                self.error = error
                raise
            view = view[len(written) :]
            while written:
                block = written[: BLOCK_BYTES - self._size % BLOCK_BYTES]
                self._digest.update(block)
                self._size += len(block)
                if self._size % BLOCK_BYTES == 0:
                    self._digests.append(self._digest.hexdigest())
                    self._digest.reset()
                written = written[len(block) :]

    def abandon(self) -> None:
        """Close the file without writing what is buffered."""
        # torch may call `write` once more, when another file has this descriptor.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def close(self) -> FileRecord:
        try:
            self.flush()
        finally:
            os.close(self._descriptor)
        if self._size % BLOCK_BYTES or not self._size:
            self._digests.append(self._digest.hexdigest())
        return FileRecord(self._size, tuple(self._digests))


def write_parts(
    directory: Path, parts: Iterable[Part], workers_count: int | None = None, on_device: bool = True
) -> dict[str, FileRecord]:
    """Write files, and bring them to the disk."""
    records: dict[str, FileRecord] = {}
    with Workers(workers_count) as workers:
        for part in parts:
            path = directory / part.name
            path.parent.mkdir(exist_ok=True)
            refuse_link(path.parent)
            file = HashingFile(path)
            target: Any = file
            try:
                part.write_value(on_host(part.value) if on_device else part.value, target)
            except BaseException as error:
                file.abandon()
                if file.error is not None and file.error is not error:
                    raise file.error from error  # torch's error does not say why it could not write
                raise
            records[part.name] = file.close()
            workers.submit(partial(sync, path))
            if part.what:
                check_readable(path, part.what)
    return records


def write_manifest(
    directory: Path,
    world_size: int,
    counters: Mapping[str, int],
    known: Mapping[str, FileRecord] | None = None,
    shared: bool = True,
) -> Manifest:
    """Write the manifest of everything in a directory, and bring to the disk what is not there yet.

    Args:
        directory: the checkpoint.
        world_size: number of processes.
        counters: for the manifest.
        known: the records of files that need not be read.
        shared: whether all of these files are in the directory; otherwise other ranks have sent them elsewhere.

    Raises:
        LinkError: a file is a symbolic link, as a hook may have made it: its target is not part of the checkpoint.
    """
    records = {} if shared else dict(known or {})
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(directory).as_posix()
            if known is not None and relative in known:
                records[relative] = known[relative]
            elif relative != MANIFEST_NAME:
                refuse_link(path)
                sync(path)
                records[relative] = record_file(path)
    versions = {"torch": str(torch.__version__), "numpy": np.__version__, "python": platform.python_version()}
    for name in ("accel", "accel-checkpoint"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        world_size=world_size,
        counters=dict(counters),
        versions=versions,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        files=dict(sorted(records.items())),
    )
    file = HashingFile(directory / MANIFEST_NAME)
    try:
        file.write(manifest.text().encode("ascii"))
    finally:
        file.close()
    sync(directory / MANIFEST_NAME)
    sync_directories(directory)
    return manifest


def sync_directories(directory: Path) -> None:
    """Wait until the names in a directory, and in those in it, are on the disk."""
    for parent, _, _ in os.walk(directory, topdown=False):
        sync(Path(parent))


def agreed_directory(target: Location, process: PartialState) -> CheckpointDirectory | RemoteDirectory:
    """The directory to write to, which is that of the main process. Every rank must call it.

    A path that is made of the time, for example, may differ between ranks.
    """
    chosen = target, new_save_id() if isinstance(target, RemotePath) else ""
    if process.num_processes > 1:
        chosen = process.collectives.broadcast_object(chosen)
    target, save_id = chosen
    return RemoteDirectory(target, save_id) if isinstance(target, RemotePath) else CheckpointDirectory(target)


@dataclass
class StateWriter:
    """One save on one rank."""

    directory: CheckpointDirectory | RemoteDirectory  # where to write; its partial directory exists
    # whether this process writes what is common to all ranks: the main process (of each node, if the nodes save on
    # their own)
    is_writer: bool
    parts: Sequence[Part]  # the files that this rank writes
    rank: int  # of this process
    world_size: int  # number of processes
    counters: Mapping[str, int]  # for the manifest
    total_limit: int | None = None  # how many automatically named checkpoints to keep; None keeps all
    # called on the writer with the directory that is being written, when every rank has written its parts
    finalizers: Sequence[Callable[[Path], None]] = ()
    on_device: bool = True  # whether tensors may be on a device
    workers: int | None = None  # threads that sync files; by default one for each processor
    process: ProcessWriter | None = None  # writes the files in another process
    committed: bool = field(default=False, init=False)  # whether the checkpoint has its final name

    def finish(self, on_all_ranks: Consensus) -> None:
        """Write the files, rename the checkpoint to its final name, delete old ones. Every rank must call it."""
        directory, partial_dir = self.directory, self.directory.partial
        try:
            with on_all_ranks(f"saving {directory.target}"), directory.explaining_write_errors():
                write = write_parts if self.process is None else self.process.write_parts
                records = write(partial_dir, self.parts, self.workers, self.on_device)
                if not (self.is_writer and directory.shared):
                    directory.hand_over(records, self.rank)
            self.parts = ()
            with on_all_ranks(f"saving {directory.target}"):
                if self.is_writer:
                    with directory.explaining_write_errors():
                        for finalize in self.finalizers:
                            finalize(partial_dir)
                        others = {}
                        if self.world_size > 1:
                            ranks = [rank for rank in range(self.world_size) if rank != self.rank]
                            others = directory.records_of_others(ranks)
                        manifest = write_manifest(
                            partial_dir, self.world_size, self.counters, {**others, **records}, directory.shared
                        )
                        directory.commit(manifest)
        except BaseException:
            directory.abandon()
            raise
        self.committed = True
        if self.total_limit is not None:
            with on_all_ranks(f"deleting old checkpoints of {directory.target.parent}"):
                if self.is_writer:
                    deleted = rotate(directory.target.parent, self.total_limit, directory.target)
                    if deleted:
                        names = ", ".join(path.name for path in deleted)
                        logger.info("Deleted %s: total_limit=%d.", names, self.total_limit)


class BackgroundSave:
    """A save next to the training loop: a thread waits for the process that writes, and the interpreter for the thread.

    Args:
        writer: of copies of the state.
        on_all_ranks: agrees on success, with collectives that the training loop does not use.
        number: of the save.
        memory: holds the copies.
    """

    def __init__(self, writer: StateWriter, on_all_ranks: Consensus, number: int, memory: SharedMemory) -> None:
        self.writer = writer
        writer.workers = 1  # the training loop has the processors
        writer.process = writer_for(memory, write_parts)
        if writer.process is not None and isinstance(writer.directory, RemoteDirectory):
            writer.directory.process = writer.process
        self.number = number
        self._on_all_ranks = on_all_ranks
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"accel-save-{number}", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.writer.finish(self._on_all_ranks)
        except BaseException as error:
            self._error = error
            target = self.writer.directory.target
            logger.error("the state could not be saved to %s: %s", target, error, main_process_only=False)
