"""Reading tensors of a safetensors file where they lie: through mappings of just their bytes, nothing else of the file.

The format: 8 bytes with the length of the header, the header as JSON (name -> type, shape, first and last byte), the
bytes. https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_state.errors import ConfigurationError

from ..offload.alignment import SMALL, is_aligned
from ..offload.host_buffer_pool import BufferPool

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The format's own limit: https://github.com/huggingface/safetensors#format
_LARGEST_HEADER = 100_000_000
# Files that are open at a time; a checkpoint may have more shards than a process may have open files.
_OPEN_FILES = 128
# Pieces of one file that are mapped apart; each mapping holds a file descriptor. Closer ones are joined until there are
# so few.
_PIECES = 64
_FIRST_GAP = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The first byte, counted from the start of the file."""
    stop: int
    """Behind the last byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


class SafetensorsFile:
    """The tensors of one file.

    Tensors that are read are private: writing into them changes neither the file nor what others read. As long as they
    live the file must not be written in place; replacing it by renaming is fine.

    Args:
        path: the file.

    Raises:
        ConfigurationError: not a safetensors file, or cut short.
    """

    in_place = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            self._version = _version(status)
            self.size = status.st_size
            header, self._data_start = _read_header(file, self.path, self.size)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries = {name: self._entry(name, item) for name, item in header.items()}

    def _entry(self, name: str, item: Any) -> TensorEntry:
        try:
            dtype, shape, (start, stop) = _DTYPES[item["dtype"]], tuple(item["shape"]), item["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self.path}: the entry of {name!r} cannot be read ({error!r}): {item}"
            ) from error
        entry = TensorEntry(dtype, shape, self._data_start + start, self._data_start + stop)
        if not 0 <= start <= stop or entry.nbytes != math.prod(shape) * dtype.itemsize:
            raise ConfigurationError(f"{self.path}: the entry of {name!r} does not fit itself: {item}")
        if entry.stop > self.size:
            raise ConfigurationError(
                f"{self.path} is cut short: {name!r} ends at byte {entry.stop} of {self.size}. Download or save it "
                "again."
            )
        return entry

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, without reading it."""
        return self.entries[name].dtype

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors that stay: mapped together where they lie together. Nothing is copied."""
        wanted = {name: self.entries[name] for name in names}
        mapped: dict[str, torch.Tensor] = {}
        for start, stop, inside in _pieces(wanted):
            memory, offset = self._map(start, stop)
            for name in inside:
                mapped[name] = _view(memory, wanted[name], wanted[name].start - start + offset)
        return mapped

    def read(self, name: str, pool: BufferPool | None = None) -> torch.Tensor:
        """One tensor for a short while: mapped; or, given a pool, copied into a buffer of it unless it lies as torch's
        own tensors do.

        Small ones are always copied so.
        """
        entry = self.entries[name]
        memory, offset = self._map(entry.start, entry.stop)
        value = _view(memory, entry, offset)
        if not entry.nbytes or is_aligned(value):
            return value
        if pool is None:
            return value.clone() if entry.nbytes < SMALL else value
        return _shaped(pool.take(entry.nbytes).copy_(value.reshape(-1).view(torch.uint8)), entry)

    def ask_for(self, names: Iterable[str]) -> None:
        """Have the system begin to read tensors from the disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        for start, stop, _ in _pieces({name: self.entries[name] for name in names}):
            _FILES.with_descriptor(
                self, lambda file, at=start, size=stop - start: os.posix_fadvise(file, at, size, os.POSIX_FADV_WILLNEED)
            )

    def _map(self, start: int, stop: int) -> tuple[mmap.mmap | bytearray, int]:
        """A private mapping of some bytes, and where they begin in it."""
        if start == stop:
            return bytearray(), 0
        aligned = start - start % mmap.ALLOCATIONGRANULARITY
        return _FILES.with_descriptor(
            self,
            lambda descriptor: (
                mmap.mmap(descriptor, stop - aligned, access=mmap.ACCESS_COPY, offset=aligned),
                start - aligned,
            ),
        )

    def check_version(self, status: os.stat_result) -> None:
        """Refuse a file that is another one than that whose header was read.

        Raises:
            ConfigurationError: it has changed since.
        """
        if _version(status) != self._version:
            raise ConfigurationError(
                f"{self.path} has changed since the model was loaded from it. Load the model again."
            )


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(file: Any, path: Path, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_LARGEST_HEADER, size - 8):
        raise ConfigurationError(
            f"{path} is not a safetensors file, or it is cut short: its header should have {length} bytes"
        )
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} is not a safetensors file: its header is a {type(header).__name__}")
    return header, 8 + length


def _view(memory: mmap.mmap | bytearray, entry: TensorEntry, offset: int) -> torch.Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return _shaped(torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=offset), entry)


def _shaped(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    if data.storage_offset() % entry.dtype.itemsize:
        data = data.clone()  # torch has no views that begin inside an element
    return data.view(entry.dtype).view(entry.shape)


def _pieces(wanted: Mapping[str, TensorEntry]) -> list[tuple[int, int, list[str]]]:
    """(first byte, behind the last byte, names) of the stretches of a file that hold the wanted tensors."""
    pieces = [
        (entry.start, entry.stop, [name]) for name, entry in sorted(wanted.items(), key=lambda item: item[1].start)
    ]
    pieces, gap = _joined(pieces, 0), _FIRST_GAP
    while len(pieces) > _PIECES:
        pieces, gap = _joined(pieces, gap), 2 * gap
    return pieces


def _joined(pieces: list[tuple[int, int, list[str]]], gap: int) -> list[tuple[int, int, list[str]]]:
    """Pieces in their order, with those joined that lie at most ``gap`` bytes apart."""
    joined: list[tuple[int, int, list[str]]] = []
    for start, stop, names in pieces:
        if joined and start <= joined[-1][1] + gap:
            before = joined.pop()
            before[2].extend(names)
            joined.append((before[0], max(before[1], stop), before[2]))
        else:
            joined.append((start, stop, names))
    return joined


class _OpenFiles:
    """Descriptors of the files that are in use, the longest unused closed first."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, int] = OrderedDict()
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked process: a thread that stayed with the other one may have held the lock."""
        self._lock = threading.Lock()

    def with_descriptor(self, file: SafetensorsFile, use: Any) -> Any:
        """Call ``use`` with a descriptor of the file; it is not closed meanwhile."""
        with self._lock:
            descriptor = self._open.get(id(file))
            if descriptor is None:
                descriptor = self._add(file)
            self._open.move_to_end(id(file))
            return use(descriptor)

    def _add(self, file: SafetensorsFile) -> int:
        descriptor = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            file.check_version(os.fstat(descriptor))
        except ConfigurationError:
            os.close(descriptor)
            raise
        self._open[id(file)] = descriptor
        weakref.finalize(file, self._close, id(file))
        while len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _close(self, key: int) -> None:
        descriptor = self._open.pop(key, None)
        if descriptor is not None:
            os.close(descriptor)


_FILES = _OpenFiles()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_FILES.begin_anew)
