"""Writing the files of a checkpoint that is not in its place yet: each is digested and brought to the disk while the
next is written.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from accel_state import get_logger

from ..core.types import Part
from .atomic_dir import CheckpointFolder, sync
from .catalog import rotate
from .contents import WeightsPart
from .digests import BLOCK_BYTES, Digests, FileRecord, Workers, record_files
from .manifest import MANIFEST_FORMAT, MANIFEST_NAME, Manifest
from .rank_consensus import Agreement, Alone, StoreAgreement, agree
from .safe_load import check_readable
from .staging import on_host

_SMALL_BYTES = 1 << 16


class _FollowedFile:
    """A file to write to, of which each block is digested as soon as it is whole. Small pieces are written together."""

    def __init__(self, path: Path, digests: Digests) -> None:
        self._path = path
        self._digests = digests
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._held_back = bytearray()
        self._error: BaseException | None = None
        self._digested = 0
        self._written = 0

    @property
    def size(self) -> int:
        """Bytes in the file so far."""
        return self._written + len(self._held_back)

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        try:
            if len(view) > _SMALL_BYTES or len(self._held_back) > _SMALL_BYTES:
                self.flush()
            if len(view) > _SMALL_BYTES:
                self._write_through(view)
            else:
                self._held_back += view
        except BaseException as error:
            self._error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Write what was held back."""
        held_back, self._held_back = self._held_back, bytearray()
        self._write_through(memoryview(held_back))

    def _write_through(self, view: memoryview) -> None:
        _write_all(self._descriptor, view)
        self._written += len(view)
        while self._written - self._digested >= BLOCK_BYTES:
            self._digest_block()

    def __enter__(self) -> _FollowedFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            os.close(self._descriptor)
        if self._error is not None and error is not self._error:
            raise self._error from error  # torch has its own words for it, and they do not say why
        while error is None and self._digested < max(self.size, 1):
            self._digest_block()

    def _digest_block(self) -> None:
        self._digests.add_block(self._path, self._digested)
        self._digested += BLOCK_BYTES


def write_parts(folder: Path, parts: Iterable[Part], workers_count: int | None = None) -> dict[str, FileRecord]:
    """Write files, and bring them to the disk.

    Args:
        folder: where to.
        parts: the files.
        workers_count: threads beside this one.

    Returns:
        Their records, by name.

    Raises:
        CheckpointError: one could not be loaded again without running code.
        OSError: or an error of torch or safetensors, if the disk cannot take them.
    """
    sizes: dict[str, int] = {}
    with Workers(workers_count) as workers:
        digests = Digests(workers)
        for part in parts:
            path = folder / part.name
            path.parent.mkdir(exist_ok=True)
            sizes[part.name] = _write_part(part, path, digests)
            workers.submit(partial(sync, path))
            if part.what:
                check_readable(path, part.what)
    return {name: digests.record(folder / name, size) for name, size in sizes.items()}


def _write_part(part: Part, path: Path, digests: Digests) -> int:
    value = on_host(part.value)
    if isinstance(part, WeightsPart):  # safetensors writes to paths only
        part.write_value(value, path)
        size = path.stat().st_size
        digests.add_file(path, size)
        return size
    with _FollowedFile(path, digests) as file:
        part.write_value(value, file)
    return file.size


def write_manifest(
    folder: Path,
    world_size: int,
    counters: Mapping[str, int],
    known: Mapping[str, FileRecord] | None = None,
    workers: int | None = None,
) -> Manifest:
    """Describe everything that is in a folder, and bring to the disk what is not there yet.

    Args:
        folder: the checkpoint.
        world_size: how many processes have saved it.
        counters: see :class:`~accel.checkpoint.manifest.Manifest`.
        known: records of files, by name, that are on the disk already.
        workers: threads.
    """
    known = known or {}
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST_NAME
    )
    others = [folder / name for name in names if name not in known]
    for path in others:
        sync(path)
    found = {path.relative_to(folder).as_posix(): record for path, record in record_files(others, workers).items()}
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        world_size=world_size,
        counters=dict(counters),
        versions=_versions(),
        saved_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        files={name: known[name] if name in known else found[name] for name in names},
    )
    _write_text(folder / MANIFEST_NAME, manifest.text())
    sync_folders(folder)
    return manifest


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    import numpy as np
    import torch

    return {
        "accel": version("accel"),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _write_text(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, memoryview(text.encode("ascii")))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, left: memoryview) -> None:
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folders(folder: Path) -> None:
    """Wait until the names in a folder, and in those in it, are on the disk."""
    for parent, _, _ in os.walk(folder, topdown=False):
        sync(Path(parent))


logger = get_logger(__name__)

_RECORDS_NAME = ".records_{}.json"
"""In a folder that is being written: what a rank has written into it. Gone before the checkpoint is in its place."""


@dataclass
class StateWriter:
    """One save on one rank.

    Attributes:
        folder: where to; its partial folder has been made.
        is_writer: whether this process makes the folder whole: the main process (of each node, if nodes save on their
            own).
        parts: what this rank writes.
        world_size: number of processes.
        counters: for the manifest.
        total_limit: how many automatically named checkpoints to keep; None keeps all.
        finalizers: called on the writer, with the folder that is being written, when all ranks have written their parts.
        workers: threads for digests; by default as many as there are processors.
        committed: whether the checkpoint is in its place.
    """

    folder: CheckpointFolder
    is_writer: bool
    parts: Sequence[Part]
    world_size: int
    counters: Mapping[str, int]
    total_limit: int | None = None
    finalizers: Sequence[Callable[[Path], None]] = ()
    workers: int | None = None
    committed: bool = False
    _records: Mapping[str, FileRecord] = field(default_factory=dict)

    def finish(self, agreement: Agreement) -> None:
        """Write the files, put the checkpoint in its place, delete old ones. Every rank must call it.

        Raises:
            CheckpointError: one of these failed on some rank; but for the last of them, what was there before is
                unchanged.
        """
        target = self.folder.target
        try:
            agree(agreement, f"saving {target}", self._write)
            agree(agreement, f"saving {target}", self._commit)
        except BaseException:
            if self.is_writer:
                self.folder.abandon()
            raise
        self.committed = True
        if self.total_limit is not None:
            agree(agreement, f"deleting old checkpoints beside {target}", self._rotate)

    def _write(self) -> None:
        with self.folder.explaining_write_errors():
            self._records = write_parts(self.folder.partial, self.parts, self.workers)
            if not self.is_writer:
                # Otherwise the writer would have to read what all the others have written.
                path = self.folder.partial / _RECORDS_NAME.format(uuid.uuid4().hex)
                path.write_text(json.dumps({name: asdict(record) for name, record in self._records.items()}))
        self.parts = ()

    def _commit(self) -> None:
        if self.is_writer:
            with self.folder.explaining_write_errors():
                for close in self.finalizers:
                    close(self.folder.partial)
                records = {**self._records_of_others(), **self._records}
                write_manifest(self.folder.partial, self.world_size, self.counters, records, self.workers)
                self.folder.commit()

    def _records_of_others(self) -> dict[str, FileRecord]:
        """What other ranks have written and brought to the disk, as far as it is still there and of its size."""
        found: dict[str, FileRecord] = {}
        for path in self.folder.partial.glob(_RECORDS_NAME.format("*")):
            for name, record in json.loads(path.read_bytes()).items():
                file = self.folder.partial / name
                if file.is_file() and file.stat().st_size == record["size"]:
                    found[name] = FileRecord(record["size"], tuple(record["digests"]))
            path.unlink()
        return found

    def _rotate(self) -> None:
        target, limit = self.folder.target, self.total_limit
        if self.is_writer and limit is not None:
            deleted = rotate(target.parent, limit, target)
            if deleted:
                logger.info("Deleted %s: total_limit=%d.", ", ".join(path.name for path in deleted), limit)


class BackgroundSave:
    """One save in a thread of its own.

    The interpreter waits for the thread before it ends. An error is logged at once, and raised by the first
    :meth:`wait`.

    Args:
        writer: what is to be written.
        agreement: how the ranks agree.
        number: the checkpoint's.
    """

    def __init__(self, writer: StateWriter, agreement: StoreAgreement | Alone, number: int) -> None:
        self.writer = writer
        self.number = number
        self._agreement = agreement
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"accel-save-{number}", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when it has ended.

        Raises:
            CheckpointError: it failed on some rank.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.writer.finish(self._agreement)
        except BaseException as error:
            self._error = error
            logger.error(
                "the state could not be saved to %s: %s", self.writer.folder.target, error, main_process_only=False
            )
        finally:
            self._agreement.leave()
