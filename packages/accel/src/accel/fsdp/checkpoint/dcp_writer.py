"""Writes sharded states in the format of ``torch.distributed.checkpoint`` without inter-rank communication.

torch's own writer communicates while it writes, which a background thread cannot do. Here ranks exchange their plans
while the state is gathered, so each rank knows what every rank writes. Offsets are known only after writing: each rank
leaves them in a small file, from which the main process makes the metadata when all ranks have finished.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

from accel_checkpoint.names import SHARD_SUFFIX, SHARD_TABLE_NAME
from accel_checkpoint.parts import Part
from accel_state.collectives.single import Collectives
from accel_state.paths import open_for_writing

from ..._torch_compat import storage_info


@dataclass(frozen=True)
class ShardPart(Part):
    """One rank's file of a sharded state, whose value is a list of tensors and bytes."""

    # the index of each item in the metadata of ``torch.distributed.checkpoint``
    indices: tuple[MetadataIndex, ...] = ()
    # (offset, length) in bytes of each item, once it was written
    written: list[tuple[int, int]] = field(default_factory=list)

    def write_value(self, value: Any, target: Any) -> None:
        self.written.clear()
        counted = _CountingWriter(target)
        for item in value:
            self.written.append(_write_item(item, counted))


class _CountingWriter:
    """Counts the bytes written to a file, so that tensors are saved into it without a copy."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.size = 0

    def write(self, data: Any) -> int:
        self.target.write(data)
        count = memoryview(data).nbytes
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
        # torch.save would write the full storage of a view.
        content = item.clone() if item.untyped_storage().nbytes() != item.nbytes else item
        torch.save(content, target)
    return begin, target.size - begin


@dataclass(frozen=True)
class OffsetsPart(Part):
    """The offsets of the items in a rank's file; written after it, and removed when the metadata is made."""

    shard: ShardPart | None = None

    def write_value(self, value: Any, target: Any) -> None:
        shard = self.shard
        assert shard is not None
        rows = [
            {
                "fqn": index.fqn,
                "offset": None if index.offset is None else list(index.offset),
                "index": index.index,
                "place": place,
            }
            for index, place in zip(shard.indices, shard.written, strict=True)
        ]
        target.write(json.dumps({"file": Path(shard.name).name, "items": rows}).encode())


def shard_state(
    state: dict[str, Any], directory: str, collectives: Collectives
) -> tuple[list[Part], Callable[[Path], None]]:
    """Plan how ranks write a state: each its own parts of tensors, and a share of what all ranks have."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=None, is_coordinator=collectives.rank == 0)
    plans = collectives.all_gather_object(planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(global_plans[collectives.rank])
    values = [planner.resolve_data(item) for item in plan.items]
    shard = ShardPart(
        name=f"{directory}/__{collectives.rank}_0{SHARD_SUFFIX}",
        value=[value.getvalue() if isinstance(value, io.BytesIO) else value.detach() for value in values],
        indices=tuple(item.index for item in plan.items),
        each_rank=True,
    )
    offsets = OffsetsPart(f"{directory}/{_offsets_name(collectives.rank)}", value=None, each_rank=True, shard=shard)
    return [shard, offsets], partial(
        _write_metadata, directory=directory, metadata=metadata, world_size=collectives.world_size
    )


def _offsets_name(rank: int) -> str:
    return f".places_{rank}.json"


def _write_metadata(checkpoint: Path, directory: str, metadata: Metadata, world_size: int) -> None:
    target = checkpoint / directory
    paths = [target / _offsets_name(rank) for rank in range(world_size)]
    FileSystemWriter(target).finish(metadata, [_write_results(path) for path in paths])
    for path in paths:
        path.unlink()


def _write_results(path: Path) -> list[WriteResult]:
    content = json.loads(path.read_bytes())
    results = []
    for item in content["items"]:
        offset, length = item["place"]
        index = MetadataIndex(item["fqn"], item["offset"], item["index"])
        info = storage_info(content["file"], offset, length)
        results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))
    return results


class TensorWriter:
    """Writes tensors one after the other, on this process alone.

    Args:
        directory: where to write; it exists.
        file_bytes: a file that has this many bytes is followed by another one.
    """

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self.directory, self.file_bytes = directory, file_bytes
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
