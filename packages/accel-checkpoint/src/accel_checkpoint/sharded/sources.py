"""Where the bytes of a sharded state come from."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

Range = tuple[str, int, int]
"""A file, and the first byte and the one after the last byte of a part of it."""


class MappedFiles:
    """The files of a directory, mapped into memory: only the parts that are used are read.

    Attributes:
        where: the directory, for messages.
    """

    def __init__(self, directory: Path) -> None:
        self.where: str = str(directory)
        self._directory = directory
        self._files: dict[str, memoryview] = {}

    def fetch(self, ranges: Sequence[Range]) -> None:
        """Read parts of files, to use soon. Here the system reads them on first use."""

    def release(self, names: Iterable[str]) -> None:
        """Give back the memory of files that are no longer needed. Here the system does."""

    def view(self, name: str, begin: int, end: int) -> memoryview:
        """Return a part of a file, of which only what was fetched may be used."""
        if name not in self._files:
            with open(self._directory / name, "rb") as file:
                self._files[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._files[name][begin:end]


def joined(ranges: Iterable[Range], gap: int) -> list[Range]:
    """Return the same parts in order, those in one where the gap between them has at most this many bytes."""
    result: list[Range] = []
    for name, begin, end in sorted(ranges):
        if result and result[-1][0] == name and begin <= result[-1][2] + gap:
            result[-1] = name, result[-1][1], max(end, result[-1][2])
        elif begin < end:
            result.append((name, begin, end))
    return result
