"""The states of random number generators: a file of each rank, or one archive of all where there are many ranks."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.paths import open_for_writing

from .atomic_dir import sync
from .names import RNG_PACK, CheckpointError
from .safe_load import read

PACKED_ABOVE = 64
"""With more ranks, their files are put into one."""


def write_pack(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write an archive of small files, by name, and bring it to the disk."""
    path = directory / RNG_PACK
    with open(open_for_writing(path), "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            # The same bytes for the same contents: an entry has no time of its own.
            archive.writestr(zipfile.ZipInfo(name), content)
    sync(path)


class RankPack:
    """The archive of a checkpoint.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: the archive is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RNG_PACK
        try:
            with zipfile.ZipFile(self._path) as archive:
                self.names: list[str] = archive.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}. Choose another checkpoint.") from error

    def read(self, name: str, load_kwargs: dict[str, Any] | None = None) -> Any:
        """Return the contents of a file; see :func:`.safe_load.read`."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                content = archive.read(name)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{self._path} is damaged: {name} cannot be read ({error}). Choose another checkpoint."
            ) from error
        return read(self._path / name, "cpu", load_kwargs, content=io.BytesIO(content))
