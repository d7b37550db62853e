"""Memory-mapped reading of tensors from a safetensors file, without mapping the rest of the file."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.safetensors_writer import DTYPES

from .mapped_pages import map_file, populate, read_sequentially
from .safetensors_header import InvalidFileError, read_header

# Each mapping of Python holds a file descriptor, so nearby byte ranges of a file are merged until so few are left.
_MAX_RANGES = 64
_FIRST_GAP = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Dtype, shape and byte range (offsets in the file) of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """The tensors of one file, mapped on demand and used where they are in the mapping.

    Mappings are private: writing into a tensor changes neither the file nor other tensors read from it. While tensors
    are in use the file must not be overwritten in place; replacing it by renaming another file over it is safe.
    """

    in_place = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        with open(self.path, "rb") as file:
            header, data_start = read_header(file, self.path)
            status = os.fstat(file.fileno())
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.version: tuple[int, int, int] = status.st_ino, status.st_size, status.st_mtime_ns
        self.entries: dict[str, TensorEntry] = {}
        for name, item in header.items():
            kind, (start, stop) = item["dtype"], item["data_offsets"]
            if kind not in DTYPES:
                raise InvalidFileError(
                    f"{self.path}: {name} has dtype {kind}, which is not supported. Allowed: {', '.join(DTYPES)}."
                )
            shape = tuple(item["shape"])
            self.entries[name] = TensorEntry(DTYPES[kind], shape, data_start + start, data_start + stop)

    def __deepcopy__(self, memo: Any) -> SafetensorsFile:
        return self

    def __reduce__(self) -> Any:
        return _reopen, (self.path, self.version)

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        return self.entries[name].dtype

    def tensors(self, names: Iterable[str], read_now: bool = False) -> dict[str, torch.Tensor]:
        """Map tensors; adjacent ones share a mapping.

        Args:
            names: their names.
            read_now: read all of their pages here, without holding the GIL, instead of when they are used.
        """
        wanted = {name: self.entries[name] for name in names}
        mapped: dict[str, torch.Tensor] = {}
        ordered = sorted(wanted.items(), key=lambda item: item[1].start)
        ranges, gap = _merged([(entry.start, entry.stop, [name]) for name, entry in ordered], 0), _FIRST_GAP
        while len(ranges) > _MAX_RANGES:
            ranges, gap = _merged(ranges, gap), 2 * gap
        for start, stop, inside in ranges:
            aligned = start - start % mmap.ALLOCATIONGRANULARITY
            memory: mmap.mmap | None = None
            if stop > start:
                memory = map_file(self._descriptor, aligned, stop - aligned, self.path)
                if read_now:
                    read_sequentially(memory)
            for name in inside:
                entry = wanted[name]
                data = torch.empty(0, dtype=torch.uint8)
                if memory is not None and entry.nbytes:
                    offset = entry.start - aligned
                    data = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=offset)
                if read_now:
                    populate(data, self.path)
                if data.data_ptr() % entry.dtype.itemsize:
                    data = data.clone()  # elements must begin at multiples of their size
                mapped[name] = data.view(entry.dtype).view(entry.shape)
        return mapped

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor."""
        return self.tensors((name,))[name]

    def read_ahead_bytes(self, start: int, nbytes: int) -> None:
        """Ask the operating system to start reading a byte range of the file into its page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, nbytes, os.POSIX_FADV_WILLNEED)

    def read_bytes(self, start: int, memory: memoryview) -> None:
        """Fill memory from the file."""
        if not hasattr(os, "preadv"):  # Windows
            aligned = start - start % mmap.ALLOCATIONGRANULARITY
            stop = start + len(memory)
            with mmap.mmap(self._descriptor, stop - aligned, access=mmap.ACCESS_READ, offset=aligned) as mapped:
                memory[:] = mapped[start - aligned :]
            return
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], start + done)
            if count == 0:
                raise ConfigurationError(f"{self.path} has been truncated since the model was loaded from it")
            done += count


def _reopen(path: Path, version: tuple[int, int, int]) -> SafetensorsFile:
    file = SafetensorsFile(path)
    if file.version != version:
        raise ConfigurationError(f"{path} has changed since the model was loaded from it. Load the model again.")
    return file


def _merged(ranges: list[tuple[int, int, list[str]]], gap: int) -> list[tuple[int, int, list[str]]]:
    """Merge sorted ranges (start, stop, names) that are at most ``gap`` bytes apart."""
    merged: list[tuple[int, int, list[str]]] = []
    for start, stop, names in ranges:
        if merged and start <= merged[-1][1] + gap:
            first, last, earlier = merged.pop()
            merged.append((first, max(last, stop), earlier + names))
        else:
            merged.append((start, stop, names))
    return merged
