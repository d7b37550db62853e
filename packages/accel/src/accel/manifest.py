"""The manifest of a checkpoint: what belongs to it, and how each file must look. It is written last, so that with it all is there."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from .checkpoint_files import CheckpointError, require_files
from .saving import write_atomically

MANIFEST_NAME = "accel_manifest.json"
MANIFEST_FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """How a file must look.

    Attributes:
        size: in bytes.
        sha256: digest of the content, in hexadecimal.
    """

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it is."""
        digest, size = hashlib.sha256(), 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return cls(size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        format: version of this description.
        world_size: how many processes saved it.
        counters: ``iteration``, the number of the next checkpoint, and ``step``, the micro batches in the open accumulation window.
        versions: of accel, torch, numpy and python.
        saved_at: time of the save, UTC, ISO 8601.
        files: relative POSIX path to record.
    """

    format: int
    world_size: int
    counters: dict[str, int]
    versions: dict[str, str]
    saved_at: str
    files: dict[str, FileRecord]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint, or None where there is none, as in those of other libraries.

        Raises:
            CheckpointError: it is damaged, of a newer format, or names files outside of the folder.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            files = {str(name): FileRecord(int(record["size"]), str(record["sha256"])) for name, record in raw["files"].items()}
            counters = {str(name): int(value) for name, value in raw["counters"].items()}
            manifest = cls(int(raw["format"]), int(raw["world_size"]), counters, dict(raw["versions"]), str(raw["saved_at"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}. Choose another checkpoint.") from error
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        if self.format != MANIFEST_FORMAT:
            raise CheckpointError(
                f"{path} has format {self.format}, and this version of accel reads {MANIFEST_FORMAT}. It was saved with accel "
                f"{self.versions.get('accel')}: load it with that."
            )
        outside = [name for name in self.files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
        if outside:
            raise CheckpointError(f"{path} names files outside of the checkpoint: {', '.join(outside)}. It is not loaded.")

    def has_sizes_of(self, folder: Path) -> bool:
        """Whether every file is there with its size; the contents are not read."""
        paths = [(folder / name, record) for name, record in self.files.items()]
        return all(path.is_file() and path.stat().st_size == record.size for path, record in paths)

    def verify(self, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Compare files with their records.

        Args:
            folder: the checkpoint.
            wanted: which names to look at.

        Raises:
            CheckpointError: files are missing, or one is not as it was written.
        """
        names = [name for name in self.files if wanted(name)]
        require_files(folder, names)
        for name in names:
            record, found = self.files[name], FileRecord.of(folder / name)
            if found != record:
                how = f"{found.size} bytes instead of {record.size}" if found.size != record.size else "other contents than were written"
                raise CheckpointError(f"{folder / name} is damaged: it has {how}. Choose another checkpoint.")


def write_manifest(folder: Path, world_size: int, counters: dict[str, int]) -> None:
    """Describe everything that is in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_NAME)
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        world_size=world_size,
        counters=counters,
        versions={"accel": version("accel"), "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files={path.relative_to(folder).as_posix(): FileRecord.of(path) for path in paths},
    )
    write_atomically(folder / MANIFEST_NAME, lambda target: _dump(asdict(manifest), target))


def _dump(content: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
