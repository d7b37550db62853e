"""Writes sharded states in the format of ``torch.distributed.checkpoint`` without inter-rank communication.

torch's own writer communicates while it writes, which a background thread cannot do. Here ranks exchange their plans
while the state is gathered, so each rank knows what every rank writes. Offsets are known only after writing: each rank
leaves them in a small file, from which the main process makes the metadata when all ranks have finished.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from accel_state.collectives.single import Collectives

from ..._torch_compat import storage_info
from ...checkpoint.names import SHARD_SUFFIX
from ...core.types import Part


@dataclass(frozen=True)
class ShardPart(Part):
    """One rank's file of a sharded state, whose value is a list of tensors and bytes."""

    # the index of each item in the metadata of ``torch.distributed.checkpoint``
    indices: tuple[MetadataIndex, ...] = ()
    # (offset, length) in bytes of each item, once it was written
    written: list[tuple[int, int]] = field(default_factory=list)

    def write_value(self, value: Any, target: Any) -> None:
        import torch

        self.written.clear()
        counted: Any = _CountingWriter(target)
        for item in value:
            begin = counted.size
            if isinstance(item, bytes):
                counted.write(item)
            else:
                # torch.save would write the full storage of a view.
                torch.save(item.clone() if item.untyped_storage().nbytes() != item.nbytes else item, counted)
            self.written.append((begin, counted.size - begin))


class _CountingWriter:
    """Counts the bytes written to a file, so that tensors are saved into it without a copy."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.size = 0

    def write(self, data: Any) -> int:
        self._target.write(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        """Do nothing: torch flushes after each tensor, but the target decides when to write out."""


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
