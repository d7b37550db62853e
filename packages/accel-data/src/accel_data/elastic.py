"""Steps that do not depend on the number of processes: their samples, the order of these, and their random numbers.

The batch size of an elastic loader is the global one. Each global batch is divided into logical shards of fixed sizes,
and rank r of W computes shards r, r + W, r + 2W, ... one after another. What a sample, a collate function or a model
draws from the global generators depends on the seed, the epoch, the position in the epoch, and the shard only: the
generators are seeded from these before each sample, each collation and each shard.

r and W are fixed for the elastic loaders of an ordinary run. With fault tolerance the ranks are the processes of the
live replicas, so both may change from one step to the next (:mod:`accel_data.replica_loader`).
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from accel_state import devices
from accel_state.splitting import share_bounds

from ._torch_compat import hidden_worker_info, pin_memory
from .batch_shard import EpochProgress, EpochStart, ShardedSampler
from .epoch_rng import SamplerRng
from .rng_state import preserve_rng
from .samplers import SequentialSource, is_plain_batch_sampler, random_access_source
from .shard_math import wrapped_ranges

# What random numbers are drawn for: part of their seed.
FOR_ORDER, FOR_SAMPLE, FOR_COLLATE, FOR_MODEL, FOR_LOOP_END = range(5)
_END = object()


def derived_seed(seed: int, epoch: int, position: int, offset: int, purpose: int) -> int:
    """Return a 64-bit seed that differs in every argument."""
    numbers = [number % 2**64 for number in (seed, epoch, position, offset, purpose)]
    return int.from_bytes(blake2b(struct.pack("<5Q", *numbers), digest_size=8).digest(), "little")


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch (on the CPU, and on all devices of a type), numpy and python."""
    torch.default_generator.manual_seed(seed)
    backend = devices.of(device)
    if backend is not None:
        backend.manual_seed_all(seed)
    # Both have the same generator: without the 1 they would draw the same numbers.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    random.seed(seed)


@dataclass(frozen=True, slots=True)
class LogicalShard:
    """The part of a global batch that one micro batch of an elastic loader has.

    Attributes:
        seed: seed of the loader.
        epoch: epoch of the loader.
        position: samples (batches, for a batch sampler of another kind) of the epoch before this step.
        index: number of this shard in its step.
        count: logical shards in the step.
        offset: samples of the step before this shard.
        slot: micro batches of this rank in the step before this one.
        slots: micro batches of this rank in the step.
        weight: the micro batch's fraction of the samples of the step. It is 0 if this rank has no shard left: it then
            repeats one that another rank computes, so that all ranks have the same number of micro batches.
        real_samples: samples of this micro batch that are not padding; None if it has no padding.
        after: position after this step.
        last: whether it is the last micro batch of the epoch.
        batch: number of this micro batch in its shard: its global batch in a step of several (gradient accumulation).
        batches: micro batches of each shard in the step.
    """

    seed: int
    epoch: int
    position: int
    index: int
    count: int
    offset: int
    slot: int
    slots: int
    weight: float
    real_samples: int | None
    after: int
    last: bool
    batch: int = 0
    batches: int = 1

    @property
    def ends_shard(self) -> bool:
        """True if it is the last micro batch of its shard in this step."""
        return self.batch + 1 == self.batches

    @property
    def ends_step(self) -> bool:
        """True if it is the last micro batch of its step."""
        return self.slot + 1 == self.slots

    def seed_for(self, purpose: int, sample: int = 0) -> int:
        """Return the seed for a sample of this shard, for collating it, or for the model."""
        return derived_seed(self.seed, self.epoch, self.position, self.offset + sample, purpose)


@dataclass(frozen=True)
class ShardRange:
    """A micro batch of a rank in a step of known size: samples [begin, end) of the step."""

    index: int
    begin: int
    end: int
    is_padding: bool  # another rank computes this shard


@lru_cache(maxsize=256)
def shard_ranges(samples: int, logical_shards: int, num_processes: int, process_index: int) -> tuple[ShardRange, ...]:
    """Return a rank's micro batches in a step of that many samples. Their number is the same on all ranks."""
    count = min(logical_shards, samples)
    ranges = []
    for first in range(0, count, num_processes):
        index = first + process_index
        is_padding = index >= count
        index = first if is_padding else index
        ranges.append(ShardRange(index, *share_bounds(samples, index, count), is_padding))
    return tuple(ranges)


@dataclass(frozen=True)
class ElasticPlan:
    """How the steps of a loader are divided.

    Attributes:
        batch_size: samples of a global batch; None if a batch sampler of another kind makes the global batches.
        logical_shards: parts that each global batch is computed in.
        num_processes: ranks that compute different shards.
        process_index: this rank.
        drop_last: drop the last global batch of an epoch if it is not full.
        even_batches: complete it with samples from the start of the epoch.
        seed: seed of the order and of all random numbers.
        window: global batches of a step; 1 without gradient accumulation.
        lockstep: give every rank the same number of micro batches in a step.
        seeds_samples: give every sample random numbers of its own; otherwise the samples of a shard, which are read one
            after another, draw from one seed, as those of a data set with ``__getitems__`` do.
    """

    batch_size: int | None
    logical_shards: int
    num_processes: int
    process_index: int
    drop_last: bool
    even_batches: bool
    seed: int
    window: int = 1
    lockstep: bool = True
    seeds_samples: bool = True

    def slots(self, samples: int) -> int:
        """Micro batches of each rank in a global batch of that many samples."""
        return -(-min(self.logical_shards, samples) // self.num_processes)

    def steps(self, length: int) -> int:
        """Global batches in an epoch of that many samples."""
        assert self.batch_size is not None
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def micro_batches(self, length: int) -> int:
        """Micro batches of each rank in an epoch of that many samples."""
        assert self.batch_size is not None
        full, tail = divmod(length, self.batch_size)
        total = full * self.slots(self.batch_size)
        if tail and not self.drop_last:
            total += self.slots(self.batch_size if self.even_batches else tail)
        return total

    def shards(
        self, epoch: int, positions: Sequence[int], samples: int, end: int, after: int, last: bool
    ) -> list[LogicalShard]:
        """Return this rank's micro batches of a step.

        Args:
            epoch: the epoch.
            positions: where each global batch of the step begins.
            samples: samples of each global batch.
            end: the position at which the data ends; the samples after it are padding.
            after: position after the step.
            last: whether it is the last step of the epoch.
        """
        parts = shard_ranges(samples, self.logical_shards, self.num_processes, self.process_index)
        if not self.lockstep:
            parts = tuple(part for part in parts if not part.is_padding) or parts[:1]
        count, slots = min(self.logical_shards, samples), len(parts) * len(positions)
        found: list[LogicalShard] = []
        for part in parts:
            size = part.end - part.begin
            for batch, position in enumerate(positions):
                kept = 0 if part.is_padding else min(size, max(0, end - position - part.begin))
                found.append(
                    LogicalShard(
                        self.seed,
                        epoch,
                        position,
                        part.index,
                        count,
                        part.begin,
                        len(found),
                        slots,
                        0.0 if part.is_padding else size / samples / len(positions),
                        None if kept == size else kept,
                        after,
                        last and len(found) + 1 == slots,
                        batch,
                        len(positions),
                    )
                )
        return found


@dataclass(slots=True)
class ShardRequest:
    """What a loader asks a map-style data set for."""

    shard: LogicalShard
    indices: list[Any]


@dataclass(slots=True)
class ShardSamples:
    """The samples of a micro batch."""

    shard: LogicalShard
    samples: Any
    state: Any = None  # the state of the data set after the step, if it has one and this is the last micro batch


@dataclass(slots=True)
class ShardBatch:
    """A micro batch, collated."""

    shard: LogicalShard
    batch: Any
    state: Any = None

    def pin_memory(self, device: str | None = None) -> ShardBatch:
        """Copy the batch to pinned memory."""
        return ShardBatch(self.shard, pin_memory(self.batch, device), self.state)


@dataclass
class ShardCollate:
    """Collate function with random numbers of its own."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, fetched: ShardSamples) -> ShardBatch:
        seed_generators(fetched.shard.seed_for(FOR_COLLATE))
        return ShardBatch(fetched.shard, self.collate_fn(fetched.samples), fetched.state)


class ShardedItems(Dataset[Any]):
    """A map-style data set with the random numbers of its logical shards; see :attr:`ElasticPlan.seeds_samples`."""

    def __init__(self, dataset: Any, seeds_samples: bool = True) -> None:
        self.dataset = dataset
        self.seeds_samples = seeds_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, request: ShardRequest) -> ShardSamples:
        shard, dataset = request.shard, self.dataset
        is_joint = callable(getattr(dataset, "__getitems__", None))
        if is_joint or not self.seeds_samples:
            seed_generators(shard.seed_for(FOR_SAMPLE))
            read = dataset.__getitems__ if is_joint else lambda indices: [dataset[index] for index in indices]
            return ShardSamples(shard, read(request.indices))
        samples = []
        for number, index in enumerate(request.indices):
            seed_generators(shard.seed_for(FOR_SAMPLE, number))
            samples.append(dataset[index])
        return ShardSamples(shard, samples)


class ElasticSampler(ShardedSampler):
    """This rank's micro batches of every step of a map-style loader.

    The order of an epoch is drawn anew from the seed and the epoch whenever an iteration begins.
    """

    def __init__(self, batch_sampler: Any, plan: ElasticPlan) -> None:
        self.batch_sampler = batch_sampler
        self.plan = plan
        self.num_processes: int = plan.num_processes
        self.process_index: int = plan.process_index
        self.is_plain: bool = is_plain_batch_sampler(batch_sampler)
        self.unit = "samples" if self.is_plain else "batches"
        self.epoch: int = 0
        self._set_up(batch_sampler)

    @property
    def sampler(self) -> Any:
        """The sampler inside the batch sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def has_even_steps(self) -> bool:
        return True

    def global_steps(self, position: int = 0) -> int:
        """Global batches of an epoch from ``position`` on."""
        if self.is_plain:
            return self.plan.steps(max(0, len(self.sampler) - position))
        return max(0, len(self.batch_sampler) - position)

    def length_from(self, position: int) -> int:
        if self.is_plain:
            return self.plan.micro_batches(max(0, len(self.sampler) - position))
        size = getattr(self.batch_sampler, "batch_size", None) or self.plan.logical_shards
        return self.global_steps(position) * self.plan.slots(size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, for the wrapped samplers too."""
        self.epoch = epoch
        sampler: Any = self.batch_sampler
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)

    def __iter__(self) -> Iterator[ShardRequest]:
        # torch's loader with workers calls this twice, so it changes nothing.
        return self._epoch(EpochProgress(), self._next_start)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[ShardRequest]:
        epoch = self.epoch
        source = self._source()
        if isinstance(source, SequentialSource):
            yield from self._plain_steps(source, epoch, start.position)
        else:
            yield from self._given_steps(source, epoch, start.position)

    def _source(self) -> SequentialSource | list[list[Any]]:
        """Return this epoch's order of samples, or of global batches if a batch sampler of another kind makes them."""
        inner = self.sampler if self.is_plain else self.batch_sampler
        self.set_epoch(self.epoch)  # some samplers advance it when they are drawn from
        with seeded_order(inner, derived_seed(self.plan.seed, self.epoch, 0, 0, FOR_ORDER)):
            if not self.is_plain:
                return [list(batch) for batch in self.batch_sampler]
            return random_access_source(inner) or ListSource(list(inner))

    def _plain_steps(self, source: SequentialSource, epoch: int, position: int) -> Iterator[ShardRequest]:
        plan, length = self.plan, source.length
        size = plan.batch_size
        assert size is not None
        steps = plan.steps(max(0, length - position))
        for first in range(0, steps, plan.window):
            positions = range(position, position + size * min(plan.window, steps - first), size)
            samples = size if plan.even_batches else min(size, length - positions[-1])
            after, last = min(positions.stop, length), first + len(positions) == steps
            for shard in plan.shards(epoch, positions, samples, length, after, last):
                yield ShardRequest(shard, self._taken(source, shard, samples))
            position = after

    def _taken(self, source: SequentialSource, shard: LogicalShard, samples: int) -> list[Any]:
        first, last = (shard.position + bound for bound in share_bounds(samples, shard.index, shard.count))
        indices: list[Any] = []
        for run in wrapped_ranges(first, last, source.length):
            indices += source.take(run.start, run.stop)
        return indices

    def _given_steps(self, batches: list[list[Any]], epoch: int, position: int) -> Iterator[ShardRequest]:
        for number in range(position, len(batches)):
            batch, last = batches[number], number + 1 == len(batches)
            for shard in self.plan.shards(epoch, [number], len(batch), number + len(batch), number + 1, last):
                begin, end = share_bounds(len(batch), shard.index, shard.count)
                yield ShardRequest(shard, batch[begin:end])


class ListSource(SequentialSource):
    """The indices of a sampler that were drawn beforehand."""

    def __init__(self, indices: list[Any]) -> None:
        super().__init__(len(indices))
        self.indices = indices

    def take(self, first: int, last: int) -> list[Any]:
        """Return the indices at positions [first, last)."""
        return self.indices[first:last]


@contextmanager
def seeded_order(sampler: Any, seed: int) -> Iterator[None]:
    """Seed a sampler for the block, whether it draws from the global generators or from its own."""
    owner = SamplerRng(sampler).owner
    with preserve_rng():
        seed_generators(seed)
        former = None if owner is None else owner.generator
        if former is not None:
            owner.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            if former is not None:
                owner.generator = former


class ShardedStream(IterableDataset[Any]):
    """This rank's micro batches of every step of an iterable data set.

    Each rank, and each worker, reads the whole stream, because whatever it left out would depend on their number. The
    data set therefore sees no worker information.
    """

    def __init__(self, dataset: Any, plan: ElasticPlan) -> None:
        self.dataset = dataset
        self.plan = plan
        self.epoch: int = 0
        self._position = 0
        self._state: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, for the data set too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin_at(self, position: int, state: Any) -> None:
        """Begin the next iteration at a step, with the state of the data set there, if it has one."""
        self._position, self._state = position, state

    def __len__(self) -> int:
        return self.plan.micro_batches(len(self.dataset))

    def __iter__(self) -> Iterator[ShardSamples]:
        worker = get_worker_info()
        found = self._micro_batches(self._position, self._state)
        return found if worker is None else islice(found, worker.id, None, worker.num_workers)

    def _micro_batches(self, position: int, state: Any) -> Iterator[ShardSamples]:
        plan = self.plan
        size = plan.batch_size
        assert size is not None
        reader = _StreamReader(self.dataset, plan.seed, self.epoch)
        head = reader.begin(position, state, size if plan.even_batches and not plan.drop_last else 0)
        chunk = reader.read(position, size)
        while chunk and not (plan.drop_last and len(chunk) < size):
            real, after = len(chunk), position + len(chunk)
            if real == size and len(head) < size:
                head = chunk
            reached = reader.state()
            # Whether the step is the last one depends on the next sample, or on all of the next step.
            following = reader.read(after, size if plan.drop_last else 1) if real == size else []
            last = not following or (plan.drop_last and len(following) < size)
            if real < size and plan.even_batches:
                source = head or chunk
                chunk = [*chunk, *(source[number % len(source)] for number in range(size - real))]
            for shard in plan.shards(self.epoch, [position], len(chunk), after, after, last):
                begin, end = share_bounds(len(chunk), shard.index, shard.count)
                yield ShardSamples(shard, chunk[begin:end], reached if shard.ends_step else None)
            position, chunk = after, following
            if following:
                chunk += reader.read(after + len(following), size - len(following))


class _StreamReader:
    """Reads an iterable data set, with the random numbers of each position."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self.has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._samples: Iterator[Any] = iter(())

    def begin(self, position: int, state: Any, head_size: int) -> list[Any]:
        """Move to a position; returns the first samples of the stream, if the last step may be completed with them."""
        self._open()
        if position == 0:
            return []
        head = self.read(0, head_size if state is not None else min(head_size, position))
        if state is not None and self.has_state:
            self.dataset.load_state_dict(copy.deepcopy(state))
            self._open()
        else:
            for skipped in range(len(head), position):
                self.read(skipped, 1)
        return head

    def _open(self) -> None:
        seed_generators(derived_seed(self.seed, self.epoch, 0, 0, FOR_ORDER))
        with hidden_worker_info():
            self._samples = iter(self.dataset)

    def read(self, position: int, count: int) -> list[Any]:
        """Return the next samples, of which the first is at ``position``."""
        found = []
        with hidden_worker_info():
            for number in range(position, position + count):
                seed_generators(derived_seed(self.seed, self.epoch, number, 0, FOR_SAMPLE))
                sample = next(self._samples, _END)
                if sample is _END:
                    break
                found.append(sample)
        return found

    def state(self) -> Any:
        """Return a copy of the data set's state; None if it has none."""
        return copy.deepcopy(self.dataset.state_dict()) if self.has_state else None
