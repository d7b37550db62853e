"""Writing a checkpoint: its files are hashed while they are written, and synced while the next one is written."""

from __future__ import annotations

import io
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from accel_state import get_logger
from accel_state.collectives.single import Collectives
from accel_state.errors import CollectiveTimeoutError
from accel_state.paths import open_for_writing, refuse_link
from accel_state.storage.url import Location, RemotePath

from .atomic_dir import CheckpointDirectory, sync
from .catalog import rotate
from .consensus import LostRanksError, Report, described, exchange, on_all_ranks
from .manifest import BLOCK_BYTES, MANIFEST_FORMAT, FileRecord, Manifest, record_file, worker_threads
from .names import MANIFEST_NAME, CheckpointError
from .parts import Part
from .rank_files import PACKED_ABOVE, write_pack
from .remote.directory import RemoteDirectory, new_save_id
from .safe_load import check_readable
from .save_process import ProcessWriter, writer_for
from .shared_memory import SharedMemory
from .staging import on_host
from .uploading import Uploader

logger: Final = get_logger(__name__)

# Small pieces are written together.
_BUFFER_BYTES = 1 << 16
# Records of this many blocks of all files of a rank are sent with the message that it has written them.
_FEW_BLOCKS = 4
# Looking for a distribution takes longer than writing a small file.
_version: Final = cache(version)
_sums_lock: Final = threading.Lock()
_sums_before: Final[list[bool]] = []  # the option of torch.save before each block in progress


class HashingFile(io.FileIO):
    """A file to write to, whose blocks are hashed as they are written.

    Small parts should be written through an :class:`io.BufferedWriter`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(open_for_writing(path), "wb")
        self._size = 0
        self._digest = xxhash.xxh3_128()
        self._digests: list[str] = []
        self.error: BaseException | None = None
        """What went wrong while writing: torch replaces this error by one of its own."""

    def write(self, data: Any) -> int:
        left = view = memoryview(data).cast("B")
        while left:
            try:
                written = left[: os.write(self.fileno(), left[:BLOCK_BYTES])]
            except BaseException as error:
                self.error = error
                raise
            left = left[len(written) :]
            while written:
                block = written[: BLOCK_BYTES - self._size % BLOCK_BYTES]
                self._digest.update(block)
                self._size += len(block)
                if self._size % BLOCK_BYTES == 0:
                    self._digests.append(self._digest.hexdigest())
                    self._digest.reset()
                written = written[len(block) :]
        return len(view)

    def finish(self) -> FileRecord:
        """Close the file after everything was written."""
        self.close()
        if self._size % BLOCK_BYTES or not self._size:
            self._digests.append(self._digest.hexdigest())
        return FileRecord(self._size, tuple(self._digests))


@contextmanager
def without_sums() -> Iterator[None]:
    """Let ``torch.save`` leave out the CRC-32 of its entries, which takes as long as writing them.

    ``torch.load`` does not compare them, and the manifest has a digest of every byte. In older versions of torch the
    option is that of all threads: blocks that overlap end with what was set before the first.
    """
    with _sums_lock:
        _sums_before.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _sums_lock:
            torch.serialization.set_crc32_options(_sums_before.pop())


def write_parts(
    directory: Path, parts: Iterable[Part], workers_count: int | None = None, on_device: bool = True
) -> dict[str, FileRecord]:
    """Write files, and bring them to the disk."""
    records: dict[str, FileRecord] = {}
    with worker_threads(workers_count) as submit, without_sums():
        for part in parts:
            path = directory / part.name
            path.parent.mkdir(exist_ok=True)
            refuse_link(path.parent)
            file = HashingFile(path)
            target: Any = io.BufferedWriter(file, _BUFFER_BYTES)
            try:
                part.write_value(on_host(part.value) if on_device else part.value, target)
                target.flush()
            except BaseException as error:
                file.close()  # torch may write once more: a closed file refuses that
                if file.error is not None and file.error is not error:
                    raise file.error from error  # torch's error does not say why it could not write
                raise
            records[part.name] = file.finish()
            submit(partial(sync, path))
            if part.what:
                check_readable(path, part.value, part.what)
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
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(directory).as_posix()
            if known is not None and relative in known:
                records[relative] = known[relative]
            elif relative != MANIFEST_NAME:
                refuse_link(path)
                sync(path)
                records[relative] = record_file(path)
        if Path(parent) != directory:  # to which the manifest is added
            sync(Path(parent))
    versions = {"torch": str(torch.__version__), "numpy": np.__version__, "python": platform.python_version()}
    for name in ("accel", "accel-checkpoint"):
        with suppress(PackageNotFoundError):
            versions[name] = _version(name)
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        world_size=world_size,
        counters=dict(counters),
        versions=versions,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        files=dict(sorted(records.items())),
    )
    with HashingFile(directory / MANIFEST_NAME) as file:
        file.write(manifest.text().encode("ascii"))
    sync(directory / MANIFEST_NAME)
    sync(directory)
    return manifest


def sync_directories(directory: Path) -> None:
    """Wait until the names in a directory, and in those in it, are on the disk."""
    for parent, _, _ in os.walk(directory, topdown=False):
        sync(Path(parent))


@dataclass
class StateWriter:
    """One save on one rank.

    Ranks meet twice: when all have written their files, and when the checkpoint has its name. Where they have to begin
    together (:meth:`begin_together`), they meet once more.
    """

    target: Location  # the checkpoint; where ranks differ, that of the main process
    rank: int = 0  # of this process
    world_size: int = 1  # number of processes
    # whether this process writes what is common to all ranks: the main process (of each node, if the nodes save on
    # their own)
    is_writer: bool = True
    each_node: bool = False  # whether the nodes save on their own
    total_limit: int | None = None  # how many automatically named checkpoints to keep; None keeps all
    on_device: bool = True  # whether tensors may be on a device
    packs: bool | None = None  # whether small files of all ranks are put into one; None: if there are many ranks
    uploader: Uploader | None = None  # copies the checkpoint into a store, on the writer; all ranks have one or none
    copy: RemotePath | None = None  # its place there
    parts: Sequence[Part] = ()  # the files that this rank writes
    counters: Mapping[str, int] = field(default_factory=dict)  # for the manifest
    # called on the writer with the directory that is being written, when every rank has written its parts
    finalizers: Sequence[Callable[[Path], None]] = ()
    workers: int | None = None  # threads that sync files; by default one for each processor
    process: ProcessWriter | None = None  # writes the files in another process
    existing: str = ""  # the error if there is a checkpoint of this name already; "" replaces it
    committed: bool = field(default=False, init=False)  # whether the checkpoint has its final name
    _joined: bool = field(default=False, init=False)  # whether this rank writes into the directory of the main process
    _staged: bool = field(default=False, init=False)  # whether it writes into one of its own

    def __post_init__(self) -> None:
        self._given = self.target
        self.directory: CheckpointDirectory | RemoteDirectory
        if isinstance(self.target, RemotePath):
            self.directory = RemoteDirectory(self.target, new_save_id())
        else:
            self.directory = CheckpointDirectory(self.target)
        self.target = self.directory.target
        has_many = self.world_size > PACKED_ABOVE if self.packs is None else self.packs
        self._packs: bool = has_many and not self.each_node
        # With a directory on each node, what a rank of this number has staged there may be a leftover.
        self._staging_ranks: int = 1 if self.each_node else self.world_size

    def begin(self, collectives: Collectives) -> None:
        """Begin on this rank; every rank must call it.

        Ranks wait for the main process only where they cannot do without: files in a store go under the prefix that it
        chooses.
        """
        if isinstance(self.target, RemotePath) and self.world_size > 1:
            self.begin_together(collectives)
            return
        if self.each_node:
            self._agree_on_path(collectives)
        if self.is_writer:
            self.directory.begin(self.existing, self._staging_ranks)

    def _agree_on_path(self, collectives: Collectives) -> None:
        """Take the path of the main process, which is then another directory on each node."""
        with on_all_ranks(collectives, f"saving {self.target}", joins=True) as outcome:
            outcome.value = self._given
        self.directory = CheckpointDirectory(outcome.reports[0].value)
        self.target = self.directory.target

    def begin_together(self, collectives: Collectives, note: Any = None) -> list[Any]:
        """Begin on the main process, and then let this rank write into the same directory.

        Args:
            collectives: of all ranks.
            note: what other ranks should know.

        Returns:
            The notes of all ranks that take part. Others write on their own.

        Raises:
            CheckpointError: the main process, or another rank that takes part, cannot begin.
        """
        if self.each_node:
            self._agree_on_path(collectives)
        with on_all_ranks(collectives, f"saving {self.target}", joins=True) as outcome:
            if self.is_writer:
                self.directory.begin(self.existing, self._staging_ranks)
            outcome.value = self.target, self.directory.save_id, note
        if not self.is_writer:
            if outcome.reports[0].joins and not self.each_node:
                target, save_id, _ = outcome.reports[0].value
                kind = RemoteDirectory if isinstance(target, RemotePath) else CheckpointDirectory
                self.directory = kind(target, save_id)
            self.directory.join()
        self._joined = True
        return [report.value[2] for report in outcome.reports if report.joins]

    @contextmanager
    def collecting(self, collectives: Collectives) -> Iterator[None]:
        """Begin, and prepare :attr:`parts` in the block, which fails on every rank if it fails on one.

        Every rank must enter it.
        """
        try:
            with on_all_ranks(collectives, f"saving {self.target}") as outcome:
                yield
                outcome.value = self.target
        except BaseException:
            self.directory.abandon()
            raise
        if not self.each_node:
            self.target = outcome.reports[0].value

    @contextmanager
    def saving(self, collectives: Collectives) -> Iterator[None]:
        """Begin, and prepare :attr:`parts` in the block, at whose end they are written.

        The checkpoint then gets its final name, and old ones are deleted. If anything fails on one rank, it fails on
        all, and an older checkpoint stays. Every rank must enter it.
        """
        try:
            with on_all_ranks(collectives, f"saving {self.target}") as outcome:
                written: _Written | None = None
                error: Exception | None = None
                try:
                    yield
                    directory, packed = self.directory, self._pack() if self._packs else {}
                    own_folder = self.parts and not (self.is_writer or self._joined)
                    if own_folder and isinstance(directory, CheckpointDirectory):
                        directory.stage(self.rank)
                        self._staged = True
                    with directory.explaining_write_errors():
                        write = write_parts if self.process is None else self.process.write_parts
                        records = write(directory.partial, self.parts, self.workers, self.on_device)
                        if isinstance(directory, RemoteDirectory):
                            records = directory.hand_over(records)
                    self.parts = ()
                    written = _Written(records, packed, [])
                except Exception as raised:
                    error = raised
                # A rank that has failed takes part too, unless it has lost the others.
                if self.world_size > 1 and not isinstance(error, (CollectiveTimeoutError, LostRanksError)):
                    written = self._gathered(written, error, collectives)
                if error is not None:
                    raise error
                if self.is_writer and written is not None:
                    self._commit(written)
                outcome.value = self.target, self.committed
                if self.committed and (self.uploader is not None or self.total_limit is not None):
                    self._clear()
        except BaseException:
            if not self.committed:
                self.directory.abandon()
            raise
        finally:
            for report in outcome.reports:
                self.committed |= report.value is not None and report.value[1]
        if not self.is_writer:
            self.directory.abandon()  # what is left of a directory of its own
        if not self.each_node:
            self.target = outcome.reports[0].value[0]

    def _pack(self) -> dict[str, bytes]:
        """Take the small files from those to write, and return what they would hold."""
        packed = {}
        for part in filter(attrgetter("is_small"), self.parts):
            content = io.BytesIO()
            with without_sums():
                part.write_value(on_host(part.value) if self.on_device else part.value, content)
            packed[part.name] = content.getvalue()
        self.parts = [part for part in self.parts if part.name not in packed]
        return packed

    def _gathered(self, own: _Written | None, error: Exception | None, collectives: Collectives) -> _Written | None:
        """Return what all ranks have written; None if one of them has failed. Every rank must call it.

        Args:
            own: what this rank has written.
            error: why it has not.
            collectives: of all ranks.
        """
        records, packed, _ = own or _Written({}, {}, [])
        # Records as plain values, and few of them, fit into the first message.
        plain = {} if self.is_writer else {name: (record.size, record.digests) for name, record in records.items()}
        is_small = not packed and sum(len(digests) for _, digests in plain.values()) <= _FEW_BLOCKS
        value = str(self.directory.partial) if self._staged else None, plain if is_small else None
        reports = exchange(collectives, Report(False, None if error is None else described(error), value))
        if any(report.error is not None for report in reports):
            return None
        contents: list[Any] = [(report.value[1], {}) for report in reports]
        if any(found is None for found, _ in contents):
            gather = collectives.all_gather_object if self.each_node else collectives.gather_object
            contents = gather((plain, packed)) or []
        written = _Written(records, {}, [Path(report.value[0]) for report in reports if report.value[0]])
        for found, files in contents:
            written.records.update({name: FileRecord(*record) for name, record in found.items()})
            written.packed.update(files)
        return written

    def _commit(self, written: _Written) -> None:
        """On a writer: give the checkpoint its name, when every rank has written its files."""
        directory = self.directory
        with directory.explaining_write_errors():
            if isinstance(directory, CheckpointDirectory):
                for staged in written.staged:
                    # Other nodes have their own, elsewhere if they share a file system.
                    if not self.each_node or (staged.parent == directory.target.parent and staged.is_dir()):
                        directory.take(staged)
                if self.world_size > 1 and not self.each_node:
                    directory.require(written.records)  # what is missing now would be missing from the manifest too
            records = written.records if self.world_size == 1 else directory.known(written.records)
            for finalize in self.finalizers:
                finalize(directory.partial)
            if self._packs:
                write_pack(directory.partial, written.packed)
            directory.commit(
                write_manifest(directory.partial, self.world_size, self.counters, records, directory.shared)
            )
        self.committed = True

    def _clear(self) -> None:
        """On a writer: delete old checkpoints."""
        if self.uploader is not None:
            # It deletes old ones too, when they are not needed for an upload any more.
            self.uploader.upload(self.target, self.copy, self.total_limit)
        elif self.total_limit is not None:
            try:
                deleted = rotate(self.target.parent, self.total_limit, self.target)
            except OSError as error:
                raise CheckpointError(
                    f"{self.target} is complete, but older checkpoints could not be deleted "
                    f"({type(error).__name__}: {error})."
                ) from error
            if deleted:
                names = ", ".join(path.name for path in deleted)
                logger.info("Deleted %s: total_limit=%d.", names, self.total_limit)


class _Written(NamedTuple):
    """What ranks have written.

    Attributes:
        records: the files.
        packed: contents of the small files that go into one.
        staged: directories of ranks that have not joined the main process.
    """

    records: dict[str, FileRecord]
    packed: dict[str, bytes]
    staged: list[Path]


class BackgroundSave:
    """A save next to the training loop: a thread waits for the process that writes, and the interpreter for the thread.

    Args:
        writer: of copies of the state.
        collectives: to agree on success, which the training loop does not use.
        number: of the save.
        memory: holds the copies.
    """

    def __init__(self, writer: StateWriter, collectives: Collectives, number: int, memory: SharedMemory) -> None:
        self.writer = writer
        writer.workers = 1  # the training loop has the processors
        writer.process = writer_for(memory, write_parts)
        if writer.process is not None and isinstance(writer.directory, RemoteDirectory):
            writer.directory.send_in(writer.process)
        self.number = number
        self._collectives = collectives
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
        time.sleep(0)  # the thread that starts this one waits for it to begin, and goes on first
        try:
            with self.writer.saving(self._collectives):
                pass  # everything is collected
        except BaseException as error:
            self._error = error
            logger.error("the state could not be saved to %s: %s", self.writer.target, error, main_process_only=False)
