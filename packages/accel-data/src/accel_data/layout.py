"""How a loader's data is spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from accel_state.errors import ConfigurationError
from accel_state.state import PartialState

from .lookahead import Step

# Ranks along these axes of a device mesh work on one and the same batch: they split the model, or the sequence.
_SHARED_BATCH_AXES = ("tp", "cp", "sp", "pp")


@dataclass
class LoaderLayout:
    """How a loader's data is spread over the ranks.

    Attributes:
        num_processes: number of ranks that get different data.
        process_index: this rank among them.
        ragged: whether batch sizes may differ between ranks in one step, for a reason that the sampler does not know
            of.
        synchronize_steps: the ranks read sources of their own, and have to agree on every step whether there is another
            one.
        elastic: positions mean the same on another number of ranks.
        position_scale: units of the whole stream that one unit of this rank's own sampler stands for.
        padding_at_end: samples at the end of this rank's data that stand in for missing ones.
        last_batch_size: samples in this rank's last batch, padding included.
    """

    num_processes: int = 1
    process_index: int = 0
    ragged: bool = False
    synchronize_steps: bool = False
    elastic: bool = True
    position_scale: int = 1
    padding_at_end: int = 0
    last_batch_size: int = 0

    def with_padding_at_end(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Mark the padding in the last batch."""
        for batch, last, real, remainder in steps:
            yield batch, last, self.last_batch_size - self.padding_at_end if last else real, remainder


def data_ranks(num_processes: int | None, process_index: int | None, mesh: Any = None) -> tuple[int, int]:
    """Number of ranks that get different data, and this one among them.

    Args:
        num_processes: as given by the caller; None takes the run's.
        process_index: likewise.
        mesh: a torch DeviceMesh with named axes; ranks that differ along tp, cp, sp or pp only get the same data.
    """
    state = PartialState()
    size = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if mesh is None:
        return size, rank
    size, rank = 1, 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in _SHARED_BATCH_AXES:
            rank = rank * mesh.size(axis) + mesh.get_local_rank(axis)
            size *= mesh.size(axis)
    return size, rank


def layout_of_distributed_sampler(
    sampler: DistributedSampler[Any], batch_size: int | None, drop_last: bool, num_processes: int, process_index: int
) -> LoaderLayout:
    """Layout of a loader whose sampler deals the samples to the ranks itself.

    The sampler repeats samples so that all ranks have equally many; those are marked as padding.

    Raises:
        ConfigurationError: it deals to another number of ranks, or to another rank.
    """
    if (sampler.num_replicas, sampler.rank) != (num_processes, process_index):
        raise ConfigurationError(
            f"the loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this process "
            "is rank "
            f"{process_index} of {num_processes}. Leave the sampler out (preparing the loader shards it), or build it "
            "with "
            f"num_replicas={num_processes}, rank={process_index}."
        )
    length = len(sampler.dataset)  # type: ignore[arg-type]
    own = len(range(process_index, length, num_processes))
    padding = max(0, sampler.num_samples - own)
    size = batch_size or 1
    last = sampler.num_samples % size or size
    if drop_last and sampler.num_samples % size:
        padding = 0
    ragged = not sampler.drop_last and length % num_processes != 0
    return LoaderLayout(
        num_processes,
        process_index,
        ragged=ragged,
        position_scale=num_processes,
        padding_at_end=padding,
        last_batch_size=last,
    )
