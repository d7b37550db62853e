"""How a loader's data is distributed over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from accel_state.errors import ConfigurationError
from accel_state.state import PartialState

from .lookahead import Step
from .other_loaders import is_split_source

# Mesh axes that shard the model or the sequence: ranks that differ along these only work on the same batch.
_SHARED_BATCH_AXES = ("tp", "cp", "sp", "pp")


@dataclass
class LoaderLayout:
    """How a loader's data is distributed over the ranks."""

    num_processes: int = 1  # ranks that get different data
    process_index: int = 0  # index of this rank among them
    ragged: bool = False  # batch sizes may differ between ranks in one step for a reason unknown to the sampler
    synchronize_steps: bool = False  # ranks read separate sources and agree on every step whether another one follows
    elastic: bool = True  # positions keep their meaning on another number of ranks
    position_scale: int = 1  # units of the whole stream per unit of this rank's own sampler
    padding_at_end: int = 0  # padding samples at the end of this rank's data
    last_batch_size: int = 0  # samples in this rank's last batch, padding included

    def with_padding_at_end(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Mark the padding in the last batch."""
        for batch, last, real, remainder in steps:
            yield batch, last, self.last_batch_size - self.padding_at_end if last else real, remainder


def data_ranks(num_processes: int | None, process_index: int | None, mesh: Any = None) -> tuple[int, int]:
    """Return the number of ranks that get different data, and the index of this rank among them.

    A device mesh with named axes overrides the arguments: ranks that differ only along tp, cp, sp or pp get the same
    data. Otherwise None means the value of the run.
    """
    if mesh is None:
        state = PartialState()  # also for loaders that log
        return (
            state.num_processes if num_processes is None else num_processes,
            state.process_index if process_index is None else process_index,
        )
    size, rank = 1, 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in _SHARED_BATCH_AXES:
            rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
            size *= mesh.size(axis)
    return size, rank


def has_part_per_rank(num_processes: int, mesh: Any = None) -> bool:
    """Return True if ranks that get different data are all ranks of the run, in their order."""
    world = PartialState().num_processes
    return num_processes == world and (mesh is None or mesh.mesh.flatten().tolist() == list(range(world)))


def distributed_sampler_layout(
    sampler: DistributedSampler[Any], batch_size: int | None, drop_last: bool, num_processes: int, process_index: int
) -> LoaderLayout:
    """Layout of a loader whose DistributedSampler already shards the samples; the samples it repeats are padding."""
    _check_distributed_sampler(sampler, num_processes, process_index)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    size = batch_size or 1
    incomplete = sampler.num_samples % size
    padding = max(0, sampler.num_samples - len(range(process_index, length, num_processes)))
    return LoaderLayout(
        num_processes,
        process_index,
        ragged=not sampler.drop_last and length % num_processes != 0,
        position_scale=num_processes,
        padding_at_end=0 if drop_last and incomplete else padding,
        last_batch_size=incomplete or size,
    )


def _check_distributed_sampler(sampler: DistributedSampler[Any], num_processes: int, process_index: int) -> None:
    """Raise ConfigurationError if a DistributedSampler is for another rank, or another number of ranks."""
    if (sampler.num_replicas, sampler.rank) != (num_processes, process_index):
        raise ConfigurationError(
            f"the loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this process "
            f"is rank {process_index} of {num_processes}. Remove the sampler (preparing the loader shards it), or "
            f"build it with num_replicas={num_processes}, rank={process_index}."
        )


def check_node_sources(sources: list[Any], num_processes: int, process_index: int, declared: bool) -> None:
    """Raise ConfigurationError if nodes of torchdata read another rank's part, or parts next to whole data."""
    split = [source for source in sources if is_split_source(source)]
    for sampler in split:
        if isinstance(sampler, DistributedSampler):
            _check_distributed_sampler(sampler, num_processes, process_index)
    if split and len(split) < len(sources) and not declared:
        whole = next(source for source in sources if not is_split_source(source))
        raise ConfigurationError(
            f"the loader's nodes read this rank's part through {type(split[0]).__name__}, and all of "
            f"{type(whole).__name__} on every rank. Let them read all of each, so that preparing the loader shards it, "
            "or a part of each (a DistributedSampler); already_sharded=True keeps the loader as it is."
        )
