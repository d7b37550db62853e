"""Reads directories of ``torch.distributed.checkpoint`` without running code and without inter-rank communication."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ..gc_pause import without_collection
from ..names import SAFETENSORS_SUFFIX, SHARD_TABLE_NAME, CheckpointError
from .archive import HEAD_BYTES, TAIL_BYTES, Descriptions, data_range, load_tensor
from .metadata import Classes, read_metadata
from .sources import MappedFiles, Range, joined
from .specs import regions

Like = Callable[[tuple[Any, ...], torch.Size, torch.dtype], "torch.Tensor | None"]
"""Allocates memory for a saved tensor, full or this rank's part, from its path in the nested state, its full shape and
its dtype; None skips the tensor."""

# Archives up to this size are read in whole; otherwise first what describes them, then the rows that are needed.
_SMALL_BYTES = 1 << 16
# Rows with at most this many bytes between them are read in one.
_GAP_BYTES = 1 << 14
# Files are read together until what is needed of them has this size.
_BATCH_BYTES = 1 << 30


class Source(Protocol):
    """Gives parts of the files of a sharded state."""

    where: str

    def fetch(self, ranges: Sequence[Range]) -> None: ...

    def view(self, name: str, begin: int, end: int) -> memoryview: ...

    def release(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True)
class _Piece:
    """A saved part of a tensor, and where what is needed of it goes."""

    file: str
    begin: int  # in the file
    end: int
    dtype: torch.dtype  # of the saved part
    shape: torch.Size
    needed: Sequence[tuple[int, int]]  # the first index and the number of them, of each dimension
    target: torch.Tensor

    @property
    def is_archive(self) -> bool:
        """True if ``torch.save`` has written it; otherwise it is the values alone."""
        return not self.file.endswith(SAFETENSORS_SUFFIX)

    @property
    def whole(self) -> bool:
        """True if it is read at once."""
        return self.end - self.begin <= _SMALL_BYTES or self.target.numel() == self.shape.numel()

    def described_by(self) -> Iterator[Range]:
        """Yield what to read first."""
        if self.whole:
            yield self.file, self.begin, self.end
        elif self.is_archive:
            yield self.file, self.begin, self.begin + HEAD_BYTES
            yield self.file, self.end - TAIL_BYTES, self.end

    def rows(self, source: Source) -> Iterator[Range]:
        """Yield what to read then."""
        if self.whole:
            return
        shape, begin, item = self.shape, self.begin, self.dtype.itemsize
        if self.is_archive:
            found = data_range(source.view(self.file, self.begin, self.end))
            if found is None:
                yield self.file, self.begin, self.end
                return
            first, last, _ = found
            begin, item = self.begin + first, (last - first) // shape.numel()
        # Up to the last dimension that is not needed in full, each index has a range of its own.
        inner = len(shape)
        while inner and self.needed[inner - 1] == (0, shape[inner - 1]):
            inner -= 1
        inner = max(inner, 1)
        block = item * shape[inner:].numel()
        start, count = self.needed[inner - 1]
        for outer in _indices(self.needed[: inner - 1], shape):
            place = begin + (outer * shape[inner - 1] + start) * block
            yield self.file, place, place + count * block

    def _read(self, source: Source, known: Descriptions) -> torch.Tensor:
        content = source.view(self.file, self.begin, self.end)
        if self.is_archive:
            return load_tensor(content, known)
        if len(content) != self.shape.numel() * self.dtype.itemsize:
            raise ValueError(f"{len(content)} bytes are not a part of shape {tuple(self.shape)} and {self.dtype}")
        if not content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape)

    def copy(self, source: Source, known: Descriptions) -> None:
        saved = self._read(source, known)
        if saved.shape != self.shape:
            raise ValueError(f"a part of shape {tuple(saved.shape)} is {tuple(self.shape)} in {SHARD_TABLE_NAME}")
        for dim, (first, count) in enumerate(self.needed):
            saved = saved.narrow(dim, first, count)
        with torch.no_grad():
            self.target.copy_(saved)


def _indices(needed: Sequence[tuple[int, int]], shape: torch.Size) -> Iterator[int]:
    """Yield the row-major positions of the needed indices of the outer dimensions."""
    positions = [0]
    for dim, (first, count) in enumerate(needed):
        positions = [position * shape[dim] + index for position in positions for index in range(first, first + count)]
    yield from positions


def read_shards(
    directory: Path, like: Like, root: str, source: Source | None = None, metadata: Metadata | None = None
) -> dict[str, Any]:
    """Read the parts of a sharded state that this rank needs, and no others.

    Args:
        directory: where it is.
        like: allocates the tensors.
        root: the first key of the nested state, such as "model".
        source: what reads the files; by default they are mapped.
        metadata: that of the directory, if it was read already.
    """
    metadata = read_metadata(directory) if metadata is None else metadata
    source = MappedFiles(directory) if source is None else source
    with without_collection(), _naming(source, SHARD_TABLE_NAME):
        state, pieces, values = _plan(source.where, metadata, like, root)
    by_file: dict[str, list[_Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    source.fetch(joined(values.values(), _GAP_BYTES))
    for name, place in values.items():
        with _naming(source, place[0]):
            state[name] = torch.load(io.BytesIO(source.view(*place)), weights_only=True)
    known: Descriptions = {}
    for files in _batches(by_file):
        _read_files(source, {file: by_file[file] for file in files}, known)
    with _naming(source, SHARD_TABLE_NAME):
        return dict(_nested({_path(metadata, name)[1:]: value for name, value in state.items()}))


def _batches(by_file: Mapping[str, Sequence[_Piece]]) -> Iterator[list[str]]:
    """Yield groups of files that are read at once."""
    batch: list[str] = []
    size = 0
    for file, pieces in by_file.items():
        batch.append(file)
        size += sum(piece.target.nbytes for piece in pieces)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_files(source: Source, by_file: Mapping[str, list[_Piece]], known: Descriptions) -> None:
    described, rows = [], []
    for pieces in by_file.values():
        described += [part for piece in pieces for part in piece.described_by()]
    source.fetch(joined(described, 0))
    for file, pieces in by_file.items():
        with _naming(source, file):
            rows += [part for piece in pieces for part in piece.rows(source)]
    source.fetch(joined(rows, _GAP_BYTES))
    for file, pieces in by_file.items():
        with _naming(source, file):
            for piece in sorted(pieces, key=attrgetter("begin")):
                piece.copy(source, known)
    source.release(by_file)


@contextmanager
def _naming(source: Source, file: str) -> Iterator[None]:
    """Add a file's name to the errors of the block."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{source.where} cannot be read: {file}: {_reason(error)}. Copy the checkpoint again, or load another one."
        ) from error


def _plan(
    where: str, metadata: Metadata, like: Like, root: str
) -> tuple[dict[str, Any], list[_Piece], dict[str, Range]]:
    """Return the tensors to read into, what to read of each file, and where values are that are not tensors."""
    state: dict[str, Any] = {}
    pieces: list[_Piece] = []
    values: dict[str, Range] = {}
    is_empty = True
    places = metadata.storage_data or {}
    for name, saved in metadata.state_dict_metadata.items():
        path = _path(metadata, name)
        if path[0] != root:
            continue
        is_empty = False
        if isinstance(saved, BytesStorageMetadata):
            info = _place(where, places, MetadataIndex(name))
            state[name] = None  # keeps the order
            values[name] = info.relative_path, info.offset, info.offset + info.length
        elif not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{where}: {name} is neither a tensor nor a value.")
        elif (memory := like(path[1:], saved.size, saved.properties.dtype)) is not None:
            state[name] = memory
            for offset, part in regions(memory):
                pieces += _pieces_of(where, places, name, saved, offset, part)
    if is_empty:
        raise CheckpointError(f"{where} holds no {root}.")
    return state, pieces, values


def _pieces_of(
    where: str, places: Any, name: str, saved: TensorStorageMetadata, offset: Sequence[int], part: torch.Tensor
) -> list[_Piece]:
    """Return what to read into a part of a tensor that begins at an offset."""
    pieces: list[_Piece] = []
    ends = [begin + size for begin, size in zip(offset, part.shape, strict=True)]
    missing = part.numel()
    for chunk in saved.chunks:
        if not missing:
            break
        needed, target = [], part
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            first, last = max(begin, offset[dim]), min(begin + size, ends[dim])
            if first >= last:
                break
            needed.append((first - begin, last - first))
        if len(needed) < part.ndim:
            continue
        for dim, (first, count) in enumerate(needed):
            target = target.narrow(dim, first + chunk.offsets[dim] - offset[dim], count)
        info = _place(where, places, MetadataIndex(name, chunk.offsets))
        begin, end, dtype = info.offset, info.offset + info.length, saved.properties.dtype
        pieces.append(_Piece(info.relative_path, begin, end, dtype, chunk.sizes, needed, target))
        missing -= target.numel()
    if missing > 0:
        raise CheckpointError(f"{where} lacks {missing} of {part.numel()} values of {name}. Copy the checkpoint again.")
    return pieces


def _place(where: str, places: Any, index: MetadataIndex) -> Any:
    info = places.get(index)
    if info is None:
        raise CheckpointError(f"{where} does not say where {index.fqn} is. Copy the checkpoint again.")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: {index.fqn} was transformed when it was saved ({info.transform_descriptors}), which only "
            "torch.distributed.checkpoint can read. Load it with that, and save it again without extensions."
        )
    return info


def tensors_in(directory: Path, root: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory by name, on the meta device; no tensor data is read."""
    metadata = read_metadata(directory)
    tensors = {}
    for name, saved in metadata.state_dict_metadata.items():
        path = _path(metadata, name)
        if path[0] == root and isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            tensors[".".join(map(str, path[1:]))] = torch.empty(saved.size, dtype=dtype, device="meta")
    return tensors


def _path(metadata: Metadata, name: str) -> tuple[Any, ...]:
    path = (metadata.planner_data or {}).get(name)
    return tuple(path) if path else tuple(name.split(".", 1))


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    """Nested dictionaries, and lists where keys are numbers."""
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        if not path:
            return value
        branches.setdefault(path[0], {})[path[1:]] = value
    nested = {key: _nested(branch) for key, branch in branches.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[key] for key in sorted(nested)]
    return nested


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


class SavedTensors:
    """Parts of the tensors in a directory, read one by one from the mapped files.

    Args:
        directory: the directory.
        classes: as in :func:`read_metadata`.
    """

    def __init__(self, directory: Path, classes: Classes | None = None) -> None:
        self.directory = directory
        metadata = read_metadata(directory, classes)
        self._tensors = {
            name: saved
            for name, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        self._places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        self._files = MappedFiles(directory)
        self._known: Descriptions = {}
        self.names: list[str] = list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        return self._tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].properties.dtype

    def read(self, name: str, first: Sequence[int] = ()) -> torch.Tensor:
        """Return the part of a tensor at its first indices: ``read(name, (3,))`` is ``tensor[3]``."""
        shape = self.shape(name)[len(first) :]
        result: torch.Tensor | None = None
        missing = shape.numel()
        for chunk in self._tensors[name].chunks:
            starts = list(zip(first, chunk.offsets, chunk.sizes, strict=False))
            if any(not begin <= index < begin + size for index, begin, size in starts):
                continue
            part = self._chunk(name, chunk.offsets, chunk.sizes)
            for index, begin, _ in starts:
                part = part[index - begin]
            if part.shape == shape:
                return part
            result = torch.empty(shape, dtype=self.dtype(name)) if result is None else result
            offsets = chunk.offsets[len(first) :]
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
            result[place] = part
            missing -= part.numel()
        if missing or result is None:
            raise CheckpointError(f"{self.directory} lacks {missing} of the {shape.numel()} values of {name}.")
        return result

    def _chunk(self, name: str, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
        try:
            info = self._places[name, offsets]
            content = self._files.view(info.relative_path, info.offset, info.offset + info.length)
            return load_tensor(content, self._known).view(sizes)
        except Exception as error:
            raise CheckpointError(
                f"{self.directory} cannot be read: the part of {name} at {tuple(offsets)}: {_reason(error)}. Copy the "
                "checkpoint again."
            ) from error
