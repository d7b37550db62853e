"""Sharded states in the format of ``torch.distributed.checkpoint``, written without a word between ranks.

torch's own writer lets ranks talk while they write, which a thread beside the training loop cannot do. Here they talk
while the state is gathered: each rank then knows what it writes, and what each of the others does. Where in its file
each tensor came to lie, a rank leaves in a small file, from which the main process makes the table of contents when all
have finished.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from accel_state.collectives.single import Collectives

from ...checkpoint.names import SHARD_SUFFIX
from ...core.types import Part


@dataclass(frozen=True)
class ShardPart(Part):
    """One rank's file of a sharded state. Its value is a list of tensors and bytes.

    Attributes:
        indices: what each item of the value is, in the words of ``torch.distributed.checkpoint``.
        written: where each item was written, as (offset, length), once it was.
    """

    indices: tuple[MetadataIndex, ...] = ()
    written: list[tuple[int, int]] = field(default_factory=list)

    def write_value(self, value: Any, target: Any) -> None:
        """Write the items one after another, each as torch saves it."""
        self.written.clear()
        counted: Any = _Counted(target)
        for item in value:
            begin = counted.size
            if isinstance(item, bytes):
                counted.write(item)
            else:
                # Of a view, torch would save all the memory behind it.
                torch.save(item.clone() if item.untyped_storage().nbytes() != item.nbytes else item, counted)
            self.written.append((begin, counted.size - begin))


class _Counted:
    """A file that knows how much was written to it, for tensors that are saved into it without a copy."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.size = 0

    def write(self, data: Any) -> int:
        self._target.write(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        """What is written stays with the target, which knows when to hand it on: torch asks after each tensor."""


@dataclass(frozen=True)
class PlacesPart(Part):
    """Where the items of a rank's file lie; written right after it, and taken away when the table of contents is made."""

    shard: ShardPart | None = None

    def write_value(self, value: Any, target: Any) -> None:
        """Write the places, which are known by now."""
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


@dataclass(frozen=True)
class ShardedState:
    """A state on its way to a folder.

    Attributes:
        parts: what this rank writes.
        close: called on the main process, with the folder of the whole checkpoint, when all ranks have written.
    """

    parts: list[Part]
    close: Callable[[Path], None]


def shard_state(state: dict[str, Any], folder: str, collectives: Collectives) -> ShardedState:
    """Divide the writing of a state among the ranks: each writes its own parts of tensors, and a share of what all
    have.

    Args:
        state: nested dictionaries and lists of DTensors, of plain tensors that are the same on all ranks, and of other
            values.
        folder: the folder's name within the checkpoint.
        collectives: of all ranks. Every rank must call this.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=None, is_coordinator=collectives.rank == 0)
    plans = collectives.all_gather_object(planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(global_plans[collectives.rank])
    values = [planner.resolve_data(item) for item in plan.items]
    shard = ShardPart(
        name=f"{folder}/__{collectives.rank}_0{SHARD_SUFFIX}",
        value=[value.getvalue() if isinstance(value, io.BytesIO) else value.detach() for value in values],
        indices=tuple(item.index for item in plan.items),
        each_rank=True,
    )
    places = PlacesPart(name=f"{folder}/{_places_name(collectives.rank)}", value=None, each_rank=True, shard=shard)
    return ShardedState(
        [shard, places], partial(_close, folder=folder, metadata=metadata, world_size=collectives.world_size)
    )


def _places_name(rank: int) -> str:
    return f".places_{rank}.json"


def _close(checkpoint: Path, folder: str, metadata: Metadata, world_size: int) -> None:
    target = checkpoint / folder
    results = [_results(target / _places_name(rank)) for rank in range(world_size)]
    FileSystemWriter(target).finish(metadata, results)
    for rank in range(world_size):
        (target / _places_name(rank)).unlink()


def _results(path: Path) -> list[WriteResult]:
    content = json.loads(path.read_bytes())
    return [_result(content["file"], item) for item in content["items"]]


def _result(file: str, item: dict[str, Any]) -> WriteResult:
    offset, length = item["place"]
    index = MetadataIndex(item["fqn"], item["offset"], item["index"])
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, offset, length))
