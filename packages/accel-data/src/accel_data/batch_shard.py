"""Sharded samplers of loaders of map-style data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_state.arguments import check_flag, check_rank
from accel_state.errors import ConfigurationError
from accel_state.state import PartialState

from .epoch_rng import SamplerRng
from .rank_comparison import compare_first_indices
from .samplers import SequentialSource, StreamSource, is_plain_batch_sampler, random_access_source
from .shard_math import ShardPlan, balanced_range, per_process_batch_size, wrapped_ranges

# A rank's batch in a step, and how many of its samples are not padding (None if it has no padding).
_RankBatch = tuple[Any, "int | None"]


def sharded_sampler(dataloader: DataLoader[Any]) -> ShardedSampler | None:
    """Return the sharded sampler of a torch loader; None if its sampler is of another kind."""
    sampler = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    return sampler if isinstance(sampler, ShardedSampler) else None


def sampler_arguments(
    dataloader: DataLoader[Any],
    num_processes: int = 1,
    process_index: int = 0,
    split_batches: bool = False,
    even_batches: bool = False,
) -> dict[str, Any]:
    """Arguments for a DataLoader that make it read this rank's shard of ``dataloader``, which has map-style data."""
    batch_sampler: Any = dataloader.batch_sampler
    if batch_sampler is None:
        item_shard = ItemShard(dataloader.sampler, num_processes, process_index, even_batches)
        return {"batch_size": None, "sampler": item_shard}
    return {
        "batch_sampler": BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)
    }


@dataclass
class EpochStart:
    """Where an epoch begins, if not at its first sample."""

    position: int = 0  # units of the stream to skip (see ShardedSampler.unit)
    origin: dict[str, Any] | None = None  # randomness to draw the epoch's order from; None draws a new order


@dataclass
class EpochProgress:
    """What is known about an epoch while its batches are drawn.

    A loader with workers draws ahead of the batches it hands out, so everything here is indexed by step or describes
    the epoch as a whole.
    """

    start: int = 0  # position at which the epoch began
    step_size: int = 1  # units of the stream per global step
    origin: dict[str, Any] | None = None  # randomness that the order was drawn from; None before the first batch
    total: int | None = None  # steps of this rank from start on; known when the last of them is drawn
    length: int | None = None  # units in the whole stream; None while unknown
    remainder: int = -1  # samples in the last global step that are not padding; -1 if a gather has nothing to drop
    real: dict[int, int] = field(default_factory=dict)  # samples that are not padding, by step, if any are


class ShardedSampler:
    """Base of sharded samplers, which can begin an epoch anywhere and know the last batch when they draw it."""

    unit = "samples"  # what positions count
    rng: SamplerRng  # of the wrapped sampler
    progress: EpochProgress  # of the latest epoch begun
    num_processes: int
    process_index: int
    _next_start: EpochStart

    @property
    def step_size(self) -> int:
        """Units of the stream per global step."""
        return self.num_processes

    @property
    def ragged(self) -> bool:
        """True if batch sizes may differ between ranks in one step."""
        return self.num_processes > 1

    @property
    def has_even_steps(self) -> bool:
        """True if all ranks certainly have the same number of steps in an epoch."""
        return self.num_processes == 1

    def length_from(self, position: int) -> int:
        """Return the number of steps of this rank in an epoch that begins at ``position``."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.length_from(0)

    def _set_up(self, sampler: Any) -> None:
        self.rng = SamplerRng(sampler)
        self.progress = EpochProgress()
        self._next_start = EpochStart()

    def use_rng_of(self, sampler: Any) -> None:
        """Track the randomness of ``sampler``, which replaced the wrapped sampler."""
        communicates = self.rng.communicates
        self.rng = SamplerRng(sampler, self.rng.synchronize)
        self.rng.communicates = communicates

    @property
    def _compares(self) -> bool:
        return self.num_processes > 1 and self.rng.may_differ

    def _stream(self, sampler: Any, head_size: int, start: EpochStart) -> StreamSource:
        """Return the items of a sampler that is read sequentially, from ``start`` on."""
        stream = StreamSource(sampler, head_size, on_first=self._compare_order if self._compares else None)
        stream.skip(start.position)
        return stream

    def _compare_order(self, first: list[Any]) -> None:
        """Raise an error on every rank if the first items of the epoch differ between the ranks.

        With ``rng_types=[]`` ranks do not wait for one another, so the first or the last of them warns.
        """
        if not self.rng.communicates:
            compare_first_indices(crc32(repr(first).encode()), self.num_processes)
            return
        collectives = PartialState().collectives
        if collectives.world_size != self.num_processes:
            return
        digest = int.from_bytes(blake2b(repr(first).encode(), digest_size=7).digest(), "little")
        digests = collectives.all_gather(torch.tensor(digest)).tolist()
        if len(set(digests)) > 1:
            other = next(rank for rank, each in enumerate(digests) if each != digests[0])
            raise ConfigurationError(
                f"the order of the samples differs between ranks 0 and {other}, so that some samples would be read "
                "twice and others not at all: the loader's sampler draws from a generator with another seed on each "
                'rank. Copy the generator from rank 0 (rng_types=["torch"]; "numpy" and "python" likewise), give the '
                "sampler an attribute `generator`, or read on one rank (dispatch_batches=True). If each rank is meant "
                "to draw samples of its own, pass already_sharded=True."
            )

    def begin_at(self, start: EpochStart) -> None:
        """Begin the next epoch at ``start``; later epochs begin at their first sample."""
        self._next_start = start

    def __iter__(self) -> Iterator[Any]:
        # torch's loader with workers calls this twice and draws from the second iterator only, so the start is
        # consumed by the first draw.
        self.progress = EpochProgress(start=self._next_start.position, step_size=self.step_size)
        return self._begin(self.progress, self._next_start)

    def _begin(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        self._next_start = EpochStart()
        yield from self._epoch(progress, start)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        raise NotImplementedError

    @staticmethod
    def _one_behind(batches: Iterator[_RankBatch], progress: EpochProgress) -> Iterator[Any]:
        """Draw one batch ahead of those handed out, so that ``total`` is known when the last one is handed out."""
        upcoming = next(batches, None)
        step = 0
        while upcoming is not None:
            batch, real = upcoming
            if real is not None:
                progress.real[step] = real
            upcoming = next(batches, None)
            step += 1
            if upcoming is None:
                progress.total = step
            yield batch
        progress.total = step


class BatchSamplerShard(ShardedSampler, BatchSampler):
    """The batches of ``batch_sampler`` that one rank gets.

    Without ``split_batches`` rank r gets every ``num_processes``-th batch, starting with the r-th; with it, the r-th
    slice of each batch. An incomplete last step is dropped if the batch sampler drops incomplete batches. Otherwise it
    is completed with samples from the start of the epoch (``even_batches``), or left incomplete, so that some ranks
    have a shorter batch or none.

    A :class:`torch.utils.data.BatchSampler` over a sequential or random sampler is sharded by arithmetic: the indices
    of other ranks are never drawn. Other batch samplers may yield batches of any size. If they have no ``batch_size``
    to complete batches to, ``even_batches`` distributes the samples of the last, incomplete round evenly over the
    ranks, so that all have the same number of steps and no sample is lost.

    Args:
        batch_sampler: batch sampler to shard; yields the same batches on every rank.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: slice each batch instead of distributing whole batches.
        even_batches: give every rank the same number of batches.

    Attributes:
        complete_to: complete the last batch from the start of the epoch until the number of samples is a multiple of
            this; used when one rank reads for several.

    Raises:
        ConfigurationError: with ``split_batches``, the batch size is not a multiple of ``num_processes``; or
            ``process_index`` is out of range.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        **others: Any,
    ) -> None:
        if others:
            # Lightning makes batch samplers anew, to shard them.
            raise ConfigurationError(
                f"a BatchSamplerShard, that of a prepared loader, was created again with {', '.join(sorted(others))}: "
                "the loader divides its samples among the ranks already. Give Lightning the loader that was not "
                "prepared, or call fabric.setup_dataloaders(loader, use_distributed_sampler=False)."
            )
        check_rank(num_processes, process_index)
        check_flag("split_batches", split_batches)
        check_flag("even_batches", even_batches)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.complete_to = 1
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        self.is_plain: bool = is_plain_batch_sampler(batch_sampler)
        self.unit = "samples" if self.is_plain else "batches"
        if split_batches and self.batch_size is not None:
            per_process_batch_size(self.batch_size, num_processes)
        self._set_up(batch_sampler)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler inside the batch sampler, or None."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches of all ranks together."""
        return len(self.batch_sampler)

    @property
    def local_batch_size(self) -> int | None:
        """Samples in a full batch of this rank; None if batches have no fixed size."""
        if self.batch_size is None or not self.split_batches:
            return self.batch_size
        return self.batch_size // self.num_processes

    @property
    def step_size(self) -> int:
        """Samples per global step; batches for a batch sampler that is not plain."""
        if self.is_plain:
            return self.plan(0).step_size
        return 1 if self.split_batches else self.num_processes

    @property
    def ragged(self) -> bool:
        return self.num_processes > 1 and not (self.is_plain and self.even_batches)

    @property
    def has_even_steps(self) -> bool:
        return self.num_processes == 1 or self.even_batches or self.drop_last

    def plan(self, length: int, start: int = 0) -> ShardPlan:
        """Return the sharding of ``length`` samples by a plain batch sampler."""
        size = self.local_batch_size
        assert size is not None
        return ShardPlan(length, size, self.num_processes, self.drop_last, self.even_batches, start)

    def length_from(self, position: int) -> int:
        if self.is_plain:
            return self.plan(len(self.sampler), position).steps(self.process_index)
        batches = max(0, self.total_length - position)
        if self.split_batches:
            return batches
        rounds, rest = divmod(batches, self.num_processes)
        if self.drop_last or rest == 0:
            return rounds
        return rounds + (1 if self.even_batches or self.process_index < rest else 0)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[list[Any]]:
        return self._plain_epoch(progress, start) if self.is_plain else self._round_epoch(progress, start)

    # Plain batch samplers

    def _plain_epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[list[Any]]:
        with self.rng.draw_order(start.origin) as progress.origin:
            source = random_access_source(self.sampler)
            if source is None:
                stream = self._stream(self.sampler, max(self.step_size, self.complete_to), start)
        if source is None:
            batches, head = self._one_behind(self._slice_chunks(stream, progress), progress), stream.head
        else:
            if self._compares:
                self._compare_order(source.take(0, min(source.length, self.step_size)))
            batches = self._planned(source, self.plan(source.length, start.position), progress)
            head = source.take(0, min(source.length, self.complete_to))
        return batches if self.complete_to == 1 else self._complete_last(batches, head, progress)

    def _complete_last(
        self, batches: Iterator[list[Any]], head: list[Any], progress: EpochProgress
    ) -> Iterator[list[Any]]:
        drawn = 0
        for step, batch in enumerate(batches):
            drawn += len(batch)
            if step + 1 == progress.total and drawn % self.complete_to:
                progress.real[step] = len(batch)
                batch = batch + _repeated(head, 0, -drawn % self.complete_to)
            yield batch

    def _planned(self, source: SequentialSource, plan: ShardPlan, progress: EpochProgress) -> Iterator[list[Any]]:
        rank = self.process_index
        progress.length, progress.remainder = plan.length, plan.remainder
        progress.total = steps = plan.steps(rank)
        if plan.even_batches and steps and plan.real_samples(rank, steps - 1) < plan.batch_size:
            progress.real[steps - 1] = plan.real_samples(rank, steps - 1)
        yield from source.batches(plan.start + rank * plan.batch_size, plan.batch_size, plan.step_size, plan.full_steps)
        if steps > plan.full_steps:
            runs = plan.ranges(rank, steps - 1)
            yield list(chain.from_iterable(source.take(run.start, run.stop) for run in runs))
        source.close()

    def _slice_chunks(self, stream: StreamSource, progress: EpochProgress) -> Iterator[_RankBatch]:
        """Yield this rank's slice of each global step of a sampler that is read sequentially."""
        plan = self.plan(0)
        first = self.process_index * plan.batch_size
        position = progress.start
        for chunk in stream.chunks(plan.step_size):
            position += len(chunk)
            batch = chunk[first : first + plan.batch_size]
            if len(chunk) == plan.step_size:
                yield batch, None
            elif not self.drop_last:
                progress.remainder = len(chunk)
                if self.even_batches:
                    offset = max(0, first - len(chunk))
                    yield batch + _repeated(stream.head, offset, plan.batch_size - len(batch)), len(batch)
                elif batch:
                    yield batch, None
        progress.length = position

    # Batch samplers of any other kind, in rounds of one batch per rank (or one batch that is split)

    def _round_epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[list[Any]]:
        with self.rng.draw_order(start.origin) as progress.origin:
            batches = self._stream(self.batch_sampler, self.num_processes, start)
        yield from self._one_behind(self._slice_rounds(batches, progress), progress)

    def _slice_rounds(self, batches: StreamSource, progress: EpochProgress) -> Iterator[_RankBatch]:
        round_size, position = self.step_size, progress.start
        upcoming = batches.read(round_size)
        while upcoming:
            current, upcoming = upcoming, batches.read(round_size)
            position += len(current)
            if upcoming or self._is_complete(current, round_size):
                yield self._from_full_round(current)
            elif not self.drop_last or len(current) == round_size:
                progress.remainder = sum(map(len, current))
                rank_batch = self._from_last_round(current, list(chain.from_iterable(batches.head)))
                if rank_batch is not None:
                    yield rank_batch
        progress.length = position

    def _is_complete(self, batches: Sequence[list[Any]], round_size: int) -> bool:
        """Return True if the round has a full batch for every rank."""
        size = self.batch_size
        return len(batches) == round_size and (size is None or all(len(batch) >= size for batch in batches))

    def _from_full_round(self, batches: Sequence[list[Any]]) -> _RankBatch:
        return self._balanced(batches[0], batches[0]) if self.split_batches else (batches[self.process_index], None)

    def _balanced(self, samples: list[Any], head: list[Any]) -> _RankBatch:
        """Return this rank's share of ``samples``; if it is empty, a sample of ``head``, because all ranks step."""
        piece = balanced_range(len(samples), self.num_processes, self.process_index)
        return (samples[piece.start : piece.stop], None) if piece else (head[:1], 0)

    def _from_last_round(self, batches: Sequence[list[Any]], head: list[Any]) -> _RankBatch | None:
        """Return this rank's batch in the last round, where batches or samples are missing."""
        rank, size = self.process_index, self.local_batch_size
        if not self.even_batches:
            return self._uneven(batches)
        if size is None:
            return self._balanced(list(chain.from_iterable(batches)), head)
        if self.split_batches:
            shares = [batches[0][other * size : (other + 1) * size] for other in range(self.num_processes)]
        else:
            shares = [*batches, *([] for _ in range(self.num_processes - len(batches)))]
        batch = list(shares[rank])
        missing = size - len(batch)
        if missing <= 0:
            return batch, None
        # The padding of each rank continues where that of the rank before it stopped.
        padding_before = sum(size - len(share) for share in shares[:rank])
        return batch + _repeated(head, padding_before, missing), len(batch)

    def _uneven(self, batches: Sequence[list[Any]]) -> _RankBatch | None:
        if not self.split_batches:
            return (batches[self.process_index], None) if self.process_index < len(batches) else None
        if self.local_batch_size is None:
            piece = balanced_range(len(batches[0]), self.num_processes, self.process_index)
        else:
            piece = range(self.process_index * self.local_batch_size, (self.process_index + 1) * self.local_batch_size)
        batch = batches[0][piece.start : piece.stop]
        return (batch, None) if batch else None


def _repeated(head: list[Any], offset: int, count: int) -> list[Any]:
    """``count`` elements of the endless repetition of ``head``, starting at ``offset``."""
    runs = wrapped_ranges(offset, offset + count, len(head))
    return list(chain.from_iterable(head[run.start : run.stop] for run in runs))


class ItemShard(ShardedSampler):
    """A rank's shard of a sampler whose items are fetched one at a time, without batching (``batch_size=None``).

    Rank r gets every ``num_processes``-th item, starting with the r-th. With ``even_batches``, ranks without an item in
    the last round repeat one from the start, which counts as padding.

    Args are those of :class:`BatchSamplerShard`, with a ``sampler`` that yields the same items on every rank.
    """

    unit = "items"

    def __init__(self, sampler: Any, num_processes: int = 1, process_index: int = 0, even_batches: bool = True) -> None:
        check_rank(num_processes, process_index)
        self.sampler = sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches
        self._set_up(sampler)

    @property
    def has_even_steps(self) -> bool:
        return self.num_processes == 1 or self.even_batches

    def length_from(self, position: int) -> int:
        plan = ShardPlan(len(self.sampler), 1, self.num_processes, even_batches=self.even_batches, start=position)
        return plan.steps(self.process_index)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        with self.rng.draw_order(start.origin) as progress.origin:
            items = self._stream(self.sampler, self.num_processes, start)
        yield from self._one_behind(self._own_items(items, progress), progress)

    def _own_items(self, items: StreamSource, progress: EpochProgress) -> Iterator[_RankBatch]:
        position = progress.start
        for chunk in items.chunks(self.num_processes):
            position += len(chunk)
            if self.process_index < len(chunk):
                yield chunk[self.process_index], None
            elif self.even_batches:
                yield _repeated(items.head, self.process_index - len(chunk), 1)[0], 0
        progress.length = position
