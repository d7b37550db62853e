"""Writes sharded states in the format of ``torch.distributed.checkpoint``, without exchanging plans between ranks.

What every rank writes follows from the specifications of tensors that each rank has (:mod:`.specs`), so ranks only
compare a fingerprint of them. A saved tensor takes a number of bytes that follows from its dtype and shape, so the main
process makes the metadata alone, without being told what was written where.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from accel_state.collectives.single import Collectives
from accel_state.paths import open_for_writing

from .._torch_compat import storage_info
from ..atomic_dir import sync
from ..gc_pause import without_collection
from ..names import SHARD_SUFFIX, SHARD_TABLE_NAME, CheckpointError
from ..parts import Part
from .specs import Specs, Structure, merged, regions, structure_of

# Structures of which ranks have different parts, by the fingerprints of all ranks; the last ones used.
_known: dict[tuple[bytes, ...], Structure] = {}
_MAX_KNOWN = 8

# The metadata that was written last, by what it follows from.
_contents: dict[tuple[Any, ...], bytes] = {}
_MAX_CONTENTS = 4

# Bytes that torch.save takes for a tensor of a dtype and shape.
_saved_sizes: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}


@dataclass(frozen=True)
class ShardPart(Part):
    """One rank's file of a sharded state, whose value is a list of tensors and bytes."""

    def write_value(self, value: Any, target: Any) -> None:
        counted = _CountingWriter(target)
        for item in value:
            _, length = _write_item(item, counted)
            if isinstance(item, torch.Tensor) and length != saved_size(item.dtype, tuple(item.shape)):
                raise CheckpointError(
                    f"{self.name}: a tensor of shape {tuple(item.shape)} took {length} bytes, which differs from an "
                    "equal one, so other ranks would look for its successors in the wrong place. Report this, with "
                    f"the version of torch ({torch.__version__})."
                )


class _CountingWriter:
    """Counts the bytes written to a file, so that tensors are saved into it without a copy."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        if self.target is not None:
            self.target.write(data)
        self.size += count
        return count

    def flush(self) -> None:
        """Do nothing: torch flushes after each tensor, but the target decides when to write out."""


def _write_item(item: torch.Tensor | bytes, target: Any) -> tuple[int, int]:
    """Write a tensor or bytes; returns the offset and the length."""
    begin = target.size
    if isinstance(item, bytes):
        target.write(item)
    else:
        # torch.save would write the full storage of a view, and the strides of one that is not contiguous.
        whole = item.is_contiguous() and item.untyped_storage().nbytes() == item.nbytes
        torch.save(item if whole else item.contiguous().clone(), target)
    return begin, target.size - begin


def saved_size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes that ``torch.save`` takes for a contiguous tensor in host memory."""
    if (dtype, shape) not in _saved_sizes:
        counter: Any = _CountingWriter(None)
        torch.save(torch.empty(shape, dtype=dtype), counter)
        _saved_sizes[dtype, shape] = counter.size
    return _saved_sizes[dtype, shape]


@dataclass(frozen=True)
class Planned:
    """What this rank holds of a state, and what all ranks hold."""

    flat: Mapping[str, Any]  # the values by name
    parts: Mapping[str, Mapping[tuple[int, ...], torch.Tensor]]  # of tensors: this rank's, by where they begin
    structure: Structure
    values: Mapping[str, bytes]  # on the main process: what is not a tensor, as torch.save writes it
    key: tuple[Any, ...]  # what the metadata follows from; its last item is None where that is not known


def plan_state(state: dict[str, Any], collectives: Collectives) -> Planned:
    """Agree with all ranks on what they hold, as :func:`shard_state` says."""
    with without_collection():
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, storage_meta=None, is_coordinator=collectives.rank == 0)
        flat, specs = planner.state_dict, Specs()
        own, print_, problem, parts = None, bytes(32), "", {}
        try:
            parts = {name: dict(regions(value)) for name, value in flat.items() if isinstance(value, torch.Tensor)}
            own = structure_of(flat, planner.mappings, specs, collectives.world_size)
            print_ = specs.fingerprint(flat)
        except ValueError as error:
            problem = str(error)
        structure = _agree(own, print_, problem, collectives)
        values = _values(flat, own, structure, collectives)
    lengths = tuple((name, len(value)) for name, value in values.items())
    key = print_, collectives.world_size, repr(structure.paths), lengths if structure is own else None
    return Planned(flat, parts, structure, values, key)


def shard_state(
    state: dict[str, Any], directory: str, collectives: Collectives
) -> tuple[list[Part], Callable[[Path], None]]:
    """Plan how ranks write a state: each its own parts of tensors, and a share of what all ranks have.

    Ranks compare 64 bytes. Only where they hold different tensors, as in pipelines, are the specifications of these
    exchanged, once for as long as they stay the same. Every rank must call it.

    Args:
        state: nested dictionaries of DTensors, tensors and values.
        directory: where the files go, in the checkpoint.
        collectives: of the ranks that hold the state.

    Returns:
        The file of this rank, and what writes the metadata; the main process calls it with the checkpoint's directory
        when every rank has written its file.

    Raises:
        CheckpointError: ranks have different tensors of one name.
    """
    planned = plan_state(state, collectives)
    content: list[torch.Tensor | bytes] = []
    for name, boxes in planned.structure.own(collectives.rank):
        for begin, size in boxes:
            # A tensor without elements may be written by a rank that has no part of it.
            empty = 0 in size
            content.append(torch.empty(size, dtype=planned.flat[name].dtype) if empty else planned.parts[name][begin])
    content += planned.values.values()
    lengths = {name: len(value) for name, value in planned.values.items()}
    make = partial(metadata_of, planned.structure, lengths)
    part = ShardPart(f"{directory}/{shard_file(collectives.rank)}", content, each_rank=True)
    return [part], partial(write_metadata, directory=directory, make=make, key=planned.key)


def shard_file(rank: int) -> str:
    """Return the name of a rank's file in the directory of a sharded state."""
    return f"__{rank}_0{SHARD_SUFFIX}"


def _agree(own: Structure | None, print_: bytes, problem: str, collectives: Collectives) -> Structure:
    """Return the structure of what all ranks hold.

    Args:
        own: the structure of what this rank holds; None if there is a problem.
        print_: its fingerprint.
        problem: why this rank cannot save, or "".
        collectives: of all ranks.
    """
    # All have the same if the largest is the smallest; the complement's largest is the smallest's complement.
    words = torch.frombuffer(bytearray(print_), dtype=torch.int64)
    extremes = collectives.all_reduce(torch.cat([words, ~words, torch.tensor([bool(problem)])]), "max")
    if extremes[-1]:
        raise CheckpointError(f"the state cannot be saved: {problem or 'another rank reports why'}.")
    assert own is not None
    if torch.equal(extremes[:4], ~extremes[4:8]):
        return own
    prints = collectives.all_gather(words)
    key = tuple(row.numpy().tobytes() for row in prints)
    # A rank that took the place of another one knows nothing, so ranks agree on whether all do.
    known = torch.tensor([-int(key in _known)])
    if collectives.all_reduce(known, "max").item() == -1:
        return _known[key]
    first_of: dict[bytes, int] = {}
    kinds = [first_of.setdefault(print_, rank) for rank, print_ in enumerate(key)]
    is_first = kinds[collectives.rank] == collectives.rank
    slim = {name: replace(spec, coordinate=None) for name, spec in own.specs.items()} if is_first else {}
    sent = collectives.all_gather_object(replace(own, specs=slim, full_writers={}) if is_first else None)
    structures = {rank: structure for rank, structure in enumerate(sent) if structure is not None}
    try:
        structure = merged(structures, kinds, collectives.rank, collectives.world_size)
    except ValueError as error:
        raise CheckpointError(f"the state cannot be saved: {error}.") from error
    while len(_known) >= _MAX_KNOWN:
        del _known[next(iter(_known))]
    _known[key] = structure
    return structure


def _values(
    flat: Mapping[str, Any], own: Structure | None, structure: Structure, collectives: Collectives
) -> dict[str, bytes]:
    """On the main process, what is not a tensor, as ``torch.save`` writes it; on others nothing."""
    assert own is not None
    values: dict[str, bytes] = {}
    is_main = collectives.rank == 0
    for name in own.values if is_main else ():
        values[name] = _saved(flat[name])
    # Values that only other ranks have may change at every save.
    lacking = set(structure.values) - set(own.values)
    if structure is not own and (lacking := collectives.broadcast_object(lacking)):
        for found in collectives.all_gather_object(
            {name: _saved(flat[name]) for name in own.values if name in lacking}
        ):
            values.update({name: value for name, value in found.items() if is_main and name not in values})
    return {name: values[name] for name in structure.values if name in values}


def _saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def metadata_of(structure: Structure, lengths: Mapping[str, int]) -> Metadata:
    """Return the metadata of a state, with the place of every part.

    Args:
        structure: of the state.
        lengths: bytes of each value that is not a tensor, which the main process writes after its tensors.
    """
    saved: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    ends: dict[int, int] = {}
    files: dict[int, str] = {}
    offsets: dict[tuple[int, ...], torch.Size] = {}
    chunks: dict[Any, ChunkStorageMetadata] = {}
    properties: dict[Any, TensorProperties] = {}
    for name, spec, boxes in structure.everything():
        dtype, own_chunks = spec.dtype, []
        for number, (box, rank) in enumerate(boxes):
            chunk = chunks.get(box)
            if chunk is None:
                offset = offsets.setdefault(box[0], torch.Size(box[0]))
                chunk = chunks[box] = ChunkStorageMetadata(offset, torch.Size(box[1]))
            own_chunks.append(chunk)
            length = _saved_sizes.get((dtype, box[1])) or saved_size(dtype, box[1])
            begin = ends.get(rank, 0)
            if rank not in files:
                files[rank] = shard_file(rank)
            places[MetadataIndex(name, chunk.offsets, number)] = storage_info(files[rank], begin, length)
            ends[rank] = begin + length
        kind = dtype, spec.requires_grad
        if kind not in properties:
            properties[kind] = TensorProperties(dtype=dtype, requires_grad=spec.requires_grad)
        saved[name] = TensorStorageMetadata(properties[kind], torch.Size(spec.shape), own_chunks)
    for name, length in lengths.items():
        saved[name] = BytesStorageMetadata()
        begin = ends.get(0, 0)
        places[MetadataIndex(name)] = storage_info(shard_file(0), begin, length)
        ends[0] = begin + length
    return Metadata(saved, planner_data=dict(structure.paths), storage_data=places)


def write_metadata(checkpoint: Path, directory: str, make: Callable[[], Metadata], key: tuple[Any, ...]) -> None:
    """Write the metadata of a state, when all ranks have written their files.

    Args:
        checkpoint: the directory of the checkpoint.
        directory: that of the state in it.
        make: makes the metadata.
        key: what it follows from; its last item is None where that is not known.
    """
    path = checkpoint / directory / SHARD_TABLE_NAME
    content = _contents.get(key) if key[-1] is not None else None
    if content is None:
        with without_collection():
            content = pickle.dumps(make())
    # With thousands of ranks it takes seconds to make, and at the next save it is the same.
    if key[-1] is not None:
        _contents[key] = content
        while len(_contents) > _MAX_CONTENTS:
            _contents.pop(next(iter(_contents)), None)
    write_synced(path, content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and bring it to the disk."""
    with os.fdopen(open_for_writing(path), "wb") as file:
        file.write(content)
    sync(path)


class TensorWriter:
    """Writes tensors one after the other, on this process alone.

    Args:
        directory: where to write; it exists.
        file_bytes: a file that has this many bytes is followed by another one.
    """

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self.directory: Path = directory
        self.file_bytes: int = file_bytes
        self.files: list[str] = []
        self._file: Any = None
        self._metadata: dict[str, Any] = {}
        self._results: list[WriteResult] = []

    def add(self, names: Sequence[str], part: torch.Tensor, size: Sequence[int], offset: Sequence[int]) -> None:
        """Write a part of a tensor of a size, once for all of its names; the part begins at an offset."""
        place = self._write(part)
        for name in names:
            properties = TensorProperties(dtype=part.dtype)
            saved = self._metadata.setdefault(name, TensorStorageMetadata(properties, torch.Size(size), []))
            saved.chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
            self._place(MetadataIndex(name, torch.Size(offset), len(saved.chunks) - 1), *place)

    def add_bytes(self, name: str, content: bytes) -> None:
        """Write a value other than a tensor."""
        self._metadata[name] = BytesStorageMetadata()
        self._place(MetadataIndex(name), *self._write(content))

    def finish(self) -> list[str]:
        """Write the metadata; returns the names of the files."""
        self._close()
        FileSystemWriter(self.directory).finish(Metadata(self._metadata), [self._results])
        return [*self.files, SHARD_TABLE_NAME]

    def _write(self, item: torch.Tensor | bytes) -> tuple[str, int, int]:
        if self._file is None or self._file.size >= self.file_bytes:
            self._close()
            self.files.append(f"__0_{len(self.files)}{SHARD_SUFFIX}")
            self._file = _CountingWriter(os.fdopen(open_for_writing(self.directory / self.files[-1]), "wb"))
        return self.files[-1], *_write_item(item, self._file)

    def _place(self, index: MetadataIndex, file: str, offset: int, length: int) -> None:
        self._results.append(WriteResult(index, length, storage_info(file, offset, length)))

    def _close(self) -> None:
        if self._file is not None:
            self._file.target.flush()
            os.fsync(self._file.target.fileno())
            self._file.target.close()
