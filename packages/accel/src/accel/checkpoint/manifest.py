"""The manifest of a checkpoint: what belongs to it, and how each file must look. It is written last, so that with it
all is there.

Torch-free, so that checkpoints can be listed and verified quickly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import xxhash

from .digests import BLOCK_BYTES, Digests, FileRecord, Workers, block_starts
from .names import MANIFEST_NAME as MANIFEST_NAME
from .names import CheckpointError, require_files

MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: version of this description.
        world_size: how many processes saved it.
        counters: ``iteration``, the number of the next checkpoint; ``step``, the micro batches in the open accumulation
            window; and ``optimizer_steps``, how often the first optimizer had stepped.
        versions: of accel, torch, numpy and python.
        saved_at: time of the save, UTC, ISO 8601.
        files: relative POSIX path to record.
    """

    format: int
    world_size: int
    counters: Mapping[str, int]
    versions: Mapping[str, str]
    saved_at: str
    files: Mapping[str, FileRecord]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint, or None where there is none, as in those of other libraries.

        Raises:
            CheckpointError: it is damaged, of a newer format, or names files outside of the folder.
        """
        path = folder / MANIFEST_NAME
        if leads_outside(folder, MANIFEST_NAME):
            raise CheckpointError(f"{path} is a link that leads outside of the checkpoint. It is not loaded.")
        try:
            text = path.read_bytes().decode("ascii")
            manifest = cls._parse(json.loads(text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint."
            ) from error
        manifest._check(path, folder)
        # Its own digest finds what is still JSON: another number, say.
        if text != manifest.text():
            raise CheckpointError(f"{path} is damaged: it is not as it was written. Choose another checkpoint.")
        return manifest

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> Manifest:
        files = {
            str(name): FileRecord(int(record["size"]), tuple(map(str, record["digests"])))
            for name, record in raw["files"].items()
        }
        counters = {str(name): int(value) for name, value in raw["counters"].items()}
        versions = {str(name): str(value) for name, value in raw["versions"].items()}
        return cls(int(raw["format"]), int(raw["world_size"]), counters, versions, str(raw["saved_at"]), files)

    def _check(self, path: Path, folder: Path) -> None:
        if self.format != MANIFEST_FORMAT:
            raise CheckpointError(
                f"{path} has format {self.format}, and this version of accel reads {MANIFEST_FORMAT}. It was saved "
                "with accel "
                f"{self.versions.get('accel')}: load it with that."
            )
        outside = [name for name in self.files if leads_outside(folder, name)]
        if outside:
            raise CheckpointError(
                f"{path} names files outside of the checkpoint: {', '.join(outside)}. It is not loaded."
            )

    def text(self) -> str:
        """The file's content. Its last entry is the digest of the rest."""
        content = {**asdict(self), "files": {name: asdict(record) for name, record in self.files.items()}}
        described = {**content, "digest": "xxh3_128", "block_bytes": BLOCK_BYTES}
        own = xxhash.xxh3_128(json.dumps(described).encode("ascii")).hexdigest()
        return json.dumps({**described, "own_digest": own}, indent=1) + "\n"

    def has_sizes_of(self, folder: Path) -> bool:
        """Whether every file is there with its size; the contents are not read."""
        return not self.differing_sizes(folder)

    def differing_sizes(self, folder: Path) -> list[str]:
        """Names of files that are missing or not of their size."""
        paths = {name: folder / name for name in self.files}
        return [
            name for name, path in paths.items() if not path.is_file() or path.stat().st_size != self.files[name].size
        ]

    def verify(self, folder: Path) -> None:
        """Compare all files with their records.

        Args:
            folder: the checkpoint.

        Raises:
            CheckpointError: files are missing, or one is not as it was written.
        """
        with Workers() as workers:
            check = Verification(self, folder, workers)
        check.conclude()


class Verification:
    """A comparison of files with their records, by workers.

    Args:
        manifest: the records.
        folder: the checkpoint.
        workers: when their block has been left, :meth:`conclude` gives the verdict.
        share: (i, n) compares every n-th block from the i-th on, where n processes that see the same files divide the
            work.

    Raises:
        CheckpointError: files are missing or of another size.
    """

    def __init__(self, manifest: Manifest, folder: Path, workers: Workers, share: tuple[int, int] = (0, 1)) -> None:
        self._folder = folder
        self._records = manifest.files
        self._check_sizes()
        self._digests = Digests(workers)
        self._mine = self._blocks()[share[0] :: share[1]]
        for name, index in self._mine:
            self._digests.add_block(folder / name, index * BLOCK_BYTES)

    def _check_sizes(self) -> None:
        require_files(self._folder, self._records)
        for name, record in self._records.items():
            size = (self._folder / name).stat().st_size
            if size != record.size or len(record.digests) != len(block_starts(size)):
                raise _damaged(self._folder / name, f"{size} bytes instead of {record.size}")

    def _blocks(self) -> list[tuple[str, int]]:
        return [(name, index) for name, record in self._records.items() for index in range(len(record.digests))]

    def conclude(self) -> None:
        """Raise CheckpointError if a file is not as it was written; the message names it."""
        for name, index in self._mine:
            start = index * BLOCK_BYTES
            if self._digests.block(self._folder / name, start) != self._records[name].digests[index]:
                where = f" after byte {start}" if start else ""
                raise _damaged(self._folder / name, f"other contents than were written{where}")


def damaged_files(manifest: Manifest, folder: Path) -> dict[str, str]:
    """Every file that is not as it was written, with what is wrong."""
    differing = manifest.differing_sizes(folder)
    problems = {name: "missing" if not (folder / name).is_file() else "not of its size" for name in differing}
    with Workers() as workers:
        digests = Digests(workers)
        for name, record in manifest.files.items():
            if name not in problems:
                digests.add_file(folder / name, record.size)
    whole = [name for name in manifest.files if name not in problems]
    changed = [
        name for name in whole if digests.record(folder / name, manifest.files[name].size) != manifest.files[name]
    ]
    return {**problems, **dict.fromkeys(changed, "other contents than were written")}


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: it has {how}. Choose another checkpoint.")


def leads_outside(folder: Path, name: str) -> bool:
    """Whether a name in a manifest is that of a file outside of the folder: by ``..``, as an absolute path, or through
    a link.
    """
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if (
        posix.is_absolute()
        or windows.drive
        or windows.root
        or ".." in (*posix.parts, *windows.parts)
        or not posix.parts
        or "\0" in name
    ):
        return True
    try:
        return not (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return True
