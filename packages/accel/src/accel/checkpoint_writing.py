"""Writing the files of a checkpoint that is not in its place yet: each is digested and brought to the disk while the next is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoint_folder import sync
from .checkpoint_parts import Part
from .digests import BLOCK_BYTES, Digests, FileRecord, Workers, record_files
from .host_copies import on_host
from .manifest import MANIFEST_FORMAT, MANIFEST_NAME, Manifest

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
            part.check(path)
    return {name: digests.record(folder / name, size) for name, size in sizes.items()}


def _write_part(part: Part, path: Path, digests: Digests) -> int:
    value = on_host(part.value)
    if part.weights:  # safetensors writes to paths only
        part.write_value(value, path)
        size = path.stat().st_size
        digests.add_file(path, size)
        return size
    with _FollowedFile(path, digests) as file:
        part.write_value(value, file)
    return file.size


def write_manifest(
    folder: Path, world_size: int, counters: Mapping[str, int], known: Mapping[str, FileRecord] | None = None, workers: int | None = None
) -> Manifest:
    """Describe everything that is in a folder, and bring to the disk what is not there yet.

    Args:
        folder: the checkpoint.
        world_size: how many processes have saved it.
        counters: see :class:`~accel.manifest.Manifest`.
        known: records of files, by name, that are on the disk already.
        workers: threads.
    """
    known = known or {}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_NAME)
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

    return {"accel": version("accel"), "torch": str(torch.__version__), "numpy": np.__version__, "python": platform.python_version()}


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
