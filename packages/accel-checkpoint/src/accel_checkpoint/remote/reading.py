"""Reading a checkpoint from object storage: small files are copied, and of sharded tensors only what is needed."""

from __future__ import annotations

import mmap
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from accel_state import PartialState
from accel_state.errors import AccelError
from accel_state.storage.store import Store
from accel_state.storage.url import RemotePath

from ..consensus import on_all_ranks
from ..manifest import BLOCK_BYTES, FileRecord, Manifest
from ..names import MANIFEST_NAME, SAFETENSORS_SUFFIX, SHARD_SUFFIX, SHARD_TABLE_NAME, CheckpointError
from ..sharded.sources import Range, joined

# A file that is read by ranges, in parts of this size at once.
_PART_BYTES = 16 << 20


class RemoteCheckpoint:
    """A checkpoint in a store.

    Args:
        place: where it is.

    Raises:
        CheckpointError: there is none, or its marker is damaged.
    """

    def __init__(self, place: RemotePath) -> None:
        self.place = place
        self._store = Store(place)
        content = self._store.read(MANIFEST_NAME)
        if content is None:
            raise CheckpointError(
                f"{place} is not a checkpoint: it has no {MANIFEST_NAME}, which is written last. Give the URL that "
                "save_state returned, or choose another checkpoint."
            )
        self._marker = content
        self.manifest: Manifest = Manifest.parse(content, f"{place}/{MANIFEST_NAME}")

    @property
    def by_ranges(self) -> set[str]:
        """The files that :meth:`source` reads by ranges."""
        names = self.manifest.files
        return {
            name
            for name in names
            if name.endswith(SHARD_SUFFIX)
            or (name.endswith(SAFETENSORS_SUFFIX) and f"{name.rpartition('/')[0]}/{SHARD_TABLE_NAME}" in names)
        }

    @property
    def copied_files(self) -> Manifest:
        """The manifest of the files that :meth:`copy_to` copies; others are compared when they are read."""
        files = {name: record for name, record in self.manifest.files.items() if name not in self.by_ranges}
        return replace(self.manifest, files=files)

    def copy_to(self, folder: Path, all_files: bool = False) -> None:
        """Copy the files, without those that are read by ranges unless ``all_files`` is set."""
        left = set() if all_files else self.by_ranges
        pairs = []
        for name in self.manifest.files:
            if name not in left:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                pairs.append((f"{self.manifest.prefix}/{name}", folder / name))
        self._store.download(pairs)
        (folder / MANIFEST_NAME).write_bytes(self._marker)

    def source(self, directory: str) -> RemoteFiles:
        """Return the files of a sharded state.

        Args:
            directory: its name in the checkpoint.
        """
        records = {}
        for name, record in self.manifest.files.items():
            if name.startswith(f"{directory}/"):
                records[name.removeprefix(f"{directory}/")] = record
        return RemoteFiles(self._store, f"{self.manifest.prefix}/{directory}", records)


@contextmanager
def copied(
    place: RemotePath, process: PartialState, all_files: bool = False
) -> Iterator[tuple[Path, RemoteCheckpoint]]:
    """Copy a checkpoint, without the files of sharded tensors, to a temporary directory of this machine.

    Every rank must enter it, with the same place; one process of each machine copies. The directory is deleted
    afterwards; errors name the place instead.

    Args:
        place: where the checkpoint is.
        process: of the run.
        all_files: copy the files of sharded tensors too, for what reads them on its own.
    """
    with tempfile.TemporaryDirectory(prefix="accel-checkpoint-") as own:
        host = socket.gethostname()
        folders = process.collectives.all_gather_object((host, own)) if process.num_processes > 1 else [(host, own)]
        folder = dict(reversed(folders))[host]
        with on_all_ranks(process.collectives, f"reading {place}"):
            checkpoint = RemoteCheckpoint(place)
            if folder == own:
                checkpoint.copy_to(Path(own), all_files)
        try:
            yield Path(folder), checkpoint
        except AccelError as error:
            if folder not in str(error):
                raise
            raise type(error)(str(error).replace(folder, str(place))) from error
        if process.num_processes > 1:
            process.collectives.barrier()  # other processes may still read the directory


class RemoteFiles:
    """The files of a sharded state, of which parts are fetched; see :class:`.sharded.reader.Source`."""

    def __init__(self, store: Store, prefix: str, records: dict[str, FileRecord]) -> None:
        self.where: str = f"{store.place}/{prefix}"
        self._store, self._prefix, self._records = store, prefix, records
        self._files: dict[str, mmap.mmap] = {}
        self._fetched: dict[str, list[Range]] = {}
        self._checked: set[tuple[str, int]] = set()

    def fetch(self, ranges: Sequence[Range]) -> None:
        """Read parts of files, and compare blocks that are there in full with their digests."""
        wanted = []
        for name, begin, end in ranges:
            record = self._records.get(name)
            if record is None or end > record.size:
                raise CheckpointError(
                    f"{self.where}/{name} is to be read up to byte {end}, which the manifest does not have. Choose "
                    "another checkpoint."
                )
            for start in range(begin, end, _PART_BYTES):
                wanted.append((name, start, min(start + _PART_BYTES, end)))
        for first in range(0, len(wanted), 64):
            part = wanted[first : first + 64]
            contents = self._store.read_ranges([(f"{self._prefix}/{name}", begin, end) for name, begin, end in part])
            for (name, begin, end), content in zip(part, contents, strict=True):
                self._memory(name)[begin:end] = content
                self._fetched.setdefault(name, []).append((name, begin, end))
        for name in {name for name, _, _ in ranges}:
            self._check(name)

    def view(self, name: str, begin: int, end: int) -> memoryview:
        """Return a part of a file that was fetched."""
        return memoryview(self._memory(name))[begin:end]

    def release(self, names: Iterable[str]) -> None:
        """Give back the memory of files that are no longer needed."""
        for name in names:
            self._files.pop(name, None)
            self._fetched.pop(name, None)

    def _memory(self, name: str) -> mmap.mmap:
        """Memory of the size of a file, of which only what was written to is taken."""
        if name not in self._files:
            self._files[name] = mmap.mmap(-1, max(self._records[name].size, 1))
        return self._files[name]

    def _check(self, name: str) -> None:
        record = self._records[name]
        for _, begin, end in joined(self._fetched[name], 0):
            first = -(-begin // BLOCK_BYTES)
            last = len(record.digests) if end == record.size else end // BLOCK_BYTES
            for block in range(first, last):
                if (name, block) in self._checked:
                    continue
                self._checked.add((name, block))
                start = block * BLOCK_BYTES
                content = self.view(name, start, min(start + BLOCK_BYTES, record.size))
                if xxhash.xxh3_128(content).hexdigest() != record.digests[block]:
                    raise CheckpointError(
                        f"{self.where}/{name} is damaged: the block at byte {start} differs from what was written. "
                        "Choose another checkpoint."
                    )
