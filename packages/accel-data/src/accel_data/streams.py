"""The sharded sampler of a loader of map-style data."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .batch_shard import BatchSamplerShard, ItemShard, ShardedStream


def sharded_stream(dataloader: DataLoader[Any]) -> ShardedStream | None:
    """The sharded sampler of a torch loader, or None if it has another kind of sampler."""
    stream = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    return stream if isinstance(stream, ShardedStream) else None


def stream_arguments(
    dataloader: DataLoader[Any], num_processes: int = 1, process_index: int = 0, split_batches: bool = False, even_batches: bool = False
) -> dict[str, Any]:
    """The arguments that make a loader of map-style data read this rank's share: a batch sampler, or a sampler and no batching."""
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": ItemShard(dataloader.sampler, num_processes, process_index, even_batches)}
    batch_sampler: Any = dataloader.batch_sampler
    return {"batch_sampler": BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)}
