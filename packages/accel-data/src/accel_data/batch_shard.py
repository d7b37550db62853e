"""The sharded sampler of a loader of map-style data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from .epoch_rng import EpochOrder
from .index_sources import SequentialSource, StreamSource, addressable_source
from .samplers import is_plain_batch_sampler
from .shard_math import ShardPlan, balanced_range, check_rank, per_process_batch_size, wrapped_ranges


def sharded_stream(dataloader: DataLoader[Any]) -> ShardedStream | None:
    """The sharded sampler of a torch loader, or None if it has another kind of sampler."""
    stream = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    return stream if isinstance(stream, ShardedStream) else None


def stream_arguments(
    dataloader: DataLoader[Any],
    num_processes: int = 1,
    process_index: int = 0,
    split_batches: bool = False,
    even_batches: bool = False,
) -> dict[str, Any]:
    """The arguments that make a loader of map-style data read this rank's share: a batch sampler, or a sampler and no
    batching.
    """
    if dataloader.batch_sampler is None:
        return {
            "batch_size": None,
            "sampler": ItemShard(dataloader.sampler, num_processes, process_index, even_batches),
        }
    batch_sampler: Any = dataloader.batch_sampler
    return {
        "batch_sampler": BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)
    }


# What a rank is handed in a step, and how many samples of it are no padding where some are.
_Cut = tuple[Any, "int | None"]


@dataclass
class EpochStart:
    """Where an epoch begins other than at its first sample.

    Attributes:
        position: units of the stream (samples, batches or items; see ``unit`` of the sharded sampler) that are left
            out.
        origin: the randomness that the epoch's order was drawn from; None draws a new order.
    """

    position: int = 0
    origin: dict[str, Any] | None = None


@dataclass
class EpochProgress:
    """What is known of an epoch while its batches are drawn.

    A loader with workers draws ahead of what it hands out, so everything here is by step, or about the epoch as a
    whole.

    Attributes:
        start: position at which the epoch began.
        step_size: units of the stream that one global step takes.
        origin: the randomness that the epoch's order was drawn from; None until the first batch is drawn.
        total: number of steps of this rank from the start on. Known at the latest when the last of them is drawn.
        length: units in the whole stream; None where that is not known yet.
        remainder: samples in the last global step that are no padding; -1 where there is nothing to leave out.
        real: for the steps whose batch holds padding, how many of its samples are none.
    """

    start: int = 0
    step_size: int = 1
    origin: dict[str, Any] | None = None
    total: int | None = None
    length: int | None = None
    remainder: int = -1
    real: dict[int, int] = field(default_factory=dict)

    def position_after(self, steps: int) -> int:
        """Position in the stream after that many steps of this epoch."""
        position = self.start + steps * self.step_size
        return position if self.length is None else min(position, max(self.start, self.length))


class ShardedStream:
    """Common part of sharded samplers: beginning an epoch anywhere, and knowing its last batch when it is drawn.

    Attributes:
        unit: what positions count.
        order: the randomness of the wrapped sampler.
        progress: that of the latest epoch begun.
    """

    unit = "samples"
    order: EpochOrder
    progress: EpochProgress
    num_processes: int
    process_index: int
    _next_start: EpochStart

    @property
    def step_size(self) -> int:
        """Units of the stream that one global step takes."""
        return self.num_processes

    @property
    def ragged(self) -> bool:
        """Whether batch sizes may differ between ranks in one step."""
        return self.num_processes > 1

    @property
    def has_even_steps(self) -> bool:
        """Whether all ranks are sure to have the same number of steps in an epoch."""
        return self.num_processes == 1

    def length_from(self, position: int) -> int:
        """Number of steps of this rank in an epoch that begins at ``position``."""
        raise NotImplementedError

    def _set_up(self, sampler: Any) -> None:
        self.order = EpochOrder(sampler)
        self.progress = EpochProgress()
        self._next_start = EpochStart()

    def use_order_of(self, sampler: Any) -> None:
        """The wrapped sampler was replaced by this one."""
        self.order = EpochOrder(sampler, self.order.synchronize)

    def begin_at(self, start: EpochStart) -> None:
        """Begin the next epoch there. The one after it is whole again."""
        self._next_start = start

    def __iter__(self) -> Iterator[Any]:
        # torch's loader with workers calls this twice and draws from the second iterator only, so an epoch begins when
        # it is drawn from.
        self.progress = EpochProgress(start=self._next_start.position, step_size=self.step_size)
        return self._begun(self.progress, self._next_start)

    def _begun(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        self._next_start = EpochStart()
        yield from self._epoch(progress, start)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        raise NotImplementedError

    @staticmethod
    def _announced(cuts: Iterator[_Cut], progress: EpochProgress) -> Iterator[Any]:
        """Hand out batches one later than they are cut, so that ``total`` is known when the last one is handed out."""
        upcoming = next(cuts, None)
        step = 0
        while upcoming is not None:
            batch, real = upcoming
            if real is not None:
                progress.real[step] = real
            upcoming = next(cuts, None)
            step += 1
            if upcoming is None:
                progress.total = step
            yield batch
        progress.total = step


class BatchSamplerShard(ShardedStream, BatchSampler):
    """The batches of ``batch_sampler`` that one rank gets.

    Without ``split_batches`` rank r gets every ``num_processes``-th batch, from the r-th on; with it, the r-th slice of
    each batch. If the last step is not full, it is dropped when the batch sampler drops incomplete batches; otherwise
    it is completed with samples from the start of the epoch (``even_batches``), or left as it is, with some ranks short
    of samples or of a whole batch.

    A :class:`torch.utils.data.BatchSampler` over a sequential or random sampler is sharded by arithmetic: other ranks'
    indices are never drawn. A batch sampler of another kind may yield batches of any size; if it has no ``batch_size``
    to complete batches to, ``even_batches`` deals the samples of the last, incomplete round evenly to the ranks, so
    that all have the same number of steps and nothing is lost.

    Args:
        batch_sampler: batch sampler to share, with the same batches on every rank.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: slice each batch, rather than deal out whole batches.
        even_batches: give every rank the same number of batches.

    Attributes:
        complete_to: the last batch is completed from the start of the epoch until the number of samples is a multiple
            of this. Of use where one rank reads for several.

    Raises:
        ConfigurationError: with ``split_batches``, the batch size is not a multiple of ``num_processes``; or there is
            no such rank.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        check_rank(num_processes, process_index)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.complete_to = 1
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.is_plain = is_plain_batch_sampler(batch_sampler)
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
        """Samples in a full batch of this rank; None where batches have no fixed size."""
        if self.batch_size is None or not self.split_batches:
            return self.batch_size
        return self.batch_size // self.num_processes

    @property
    def step_size(self) -> int:
        """Samples, or for a batch sampler of another kind batches, that one global step takes."""
        if self.is_plain:
            return self.plan(0).step_size
        return 1 if self.split_batches else self.num_processes

    @property
    def ragged(self) -> bool:
        """Whether batch sizes may differ between ranks in one step."""
        return self.num_processes > 1 and not (self.is_plain and self.even_batches)

    @property
    def has_even_steps(self) -> bool:
        """Whether all ranks are sure to have the same number of steps in an epoch."""
        return self.num_processes == 1 or self.even_batches or self.drop_last

    def plan(self, length: int, start: int = 0) -> ShardPlan:
        """The arithmetic of a plain batch sampler over ``length`` samples."""
        size = self.local_batch_size
        assert size is not None
        return ShardPlan(length, size, self.num_processes, self.drop_last, self.even_batches, start)

    def __len__(self) -> int:
        return self.length_from(0)

    def length_from(self, position: int) -> int:
        """Number of batches of this rank in an epoch that begins at ``position``."""
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

    def _plain_epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[list[Any]]:
        with self.order.beginning(start.origin) as progress.origin:
            source = addressable_source(self.sampler)
            if source is None:
                stream = StreamSource(self.sampler, max(self.step_size, self.complete_to))
                stream.skip(start.position)
        if source is None:
            batches, head = self._announced(self._cut_chunks(stream, progress), progress), stream.head
        else:
            batches = self._planned(source, self.plan(source.length, start.position), progress)
            head = source.take(0, min(source.length, self.complete_to))
        return batches if self.complete_to == 1 else self._completed_at_end(batches, head, progress)

    def _completed_at_end(
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
            yield [index for run in plan.ranges(rank, steps - 1) for index in source.take(run.start, run.stop)]
        source.close()

    def _cut_chunks(self, stream: StreamSource, progress: EpochProgress) -> Iterator[_Cut]:
        """This rank's slice of each global step of a sampler that can only be read in order."""
        plan = self.plan(0)
        first = self.process_index * plan.batch_size
        position = progress.start
        for chunk in stream.chunks(plan.step_size):
            position += len(chunk)
            if len(chunk) == plan.step_size:
                yield chunk[first : first + plan.batch_size], None
            elif not self.drop_last:
                progress.remainder = len(chunk)
                own = chunk[first : first + plan.batch_size]
                if self.even_batches:
                    padding = max(0, first - len(chunk))
                    yield own + _repeated(stream.head, padding, plan.batch_size - len(own)), len(own)
                elif own:
                    yield own, None
        progress.length = position

    def _round_epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[list[Any]]:
        """Batches of a batch sampler that may do as it likes, in rounds of one batch a rank."""
        with self.order.beginning(start.origin) as progress.origin:
            batches = StreamSource(self.batch_sampler, self.num_processes)
            batches.skip(start.position)
        yield from self._announced(self._cut_rounds(batches, progress), progress)

    def _cut_rounds(self, batches: StreamSource, progress: EpochProgress) -> Iterator[_Cut]:
        round_size, position = self.step_size, progress.start
        upcoming = batches.read(round_size)
        while upcoming:
            current, upcoming = upcoming, batches.read(round_size)
            position += len(current)
            if upcoming or not self._needs_completion(current, round_size):
                cut: _Cut | None = self._deal(current)
            elif self.drop_last and len(current) < round_size:
                cut = None
            else:
                progress.remainder = sum(map(len, current))
                cut = self._complete(current, list(chain.from_iterable(batches.head)))
            if cut is not None:
                yield cut
        progress.length = position

    def _needs_completion(self, batches: Sequence[list[Any]], round_size: int) -> bool:
        """Whether the last round is not one full batch for every rank."""
        return len(batches) < round_size or (
            self.batch_size is not None and any(len(batch) < self.batch_size for batch in batches)
        )

    def _deal(self, batches: Sequence[list[Any]]) -> _Cut:
        """This rank's batch in a round that has one for everybody."""
        if not self.split_batches:
            return batches[self.process_index], None
        batch = batches[0]
        piece = balanced_range(len(batch), self.num_processes, self.process_index)
        own = batch[piece.start : piece.stop]
        # A batch with fewer samples than ranks: the rank must take part in the step, with a sample that does not count.
        return (own, None) if own else (batch[:1], 0)

    def _complete(self, batches: Sequence[list[Any]], head: list[Any]) -> _Cut | None:
        """This rank's batch in the last round, where batches or samples are missing."""
        if not self.even_batches:
            return self._leave_uneven(batches)
        samples = list(chain.from_iterable(batches))
        if self.local_batch_size is None:
            piece = balanced_range(len(samples), self.num_processes, self.process_index)
            own = samples[piece.start : piece.stop]
            return (own, None) if own else (head[:1], 0)
        return self._complete_to_size(batches, head)

    def _complete_to_size(self, batches: Sequence[list[Any]], head: list[Any]) -> _Cut:
        """Fill up the rank's batch from the start of the epoch, where the filling of the ranks before it stopped."""
        size = self.local_batch_size
        assert size is not None
        if self.split_batches:
            whole = batches[0]
            parts = [whole[rank * size : (rank + 1) * size] for rank in range(self.num_processes)]
        else:
            parts = [list(batches[rank]) if rank < len(batches) else [] for rank in range(self.num_processes)]
        own = parts[self.process_index]
        filled_before = sum(size - len(part) for part in parts[: self.process_index])
        missing = size - len(own)
        return (own + _repeated(head, filled_before, missing), len(own)) if missing > 0 else (own, None)

    def _leave_uneven(self, batches: Sequence[list[Any]]) -> _Cut | None:
        if not self.split_batches:
            return (batches[self.process_index], None) if self.process_index < len(batches) else None
        if self.local_batch_size is None:
            piece = balanced_range(len(batches[0]), self.num_processes, self.process_index)
        else:
            piece = range(self.process_index * self.local_batch_size, (self.process_index + 1) * self.local_batch_size)
        own = batches[0][piece.start : piece.stop]
        return (own, None) if own else None


def _repeated(head: list[Any], offset: int, count: int) -> list[Any]:
    """``count`` elements of the endless repetition of ``head``, from ``offset`` on."""
    return [
        element for run in wrapped_ranges(offset, offset + count, len(head)) for element in head[run.start : run.stop]
    ]


class ItemShard(ShardedStream):
    """A rank's share of a sampler whose items are fetched one by one, without batching (``batch_size=None``).

    Rank r gets every ``num_processes``-th item, from the r-th on. With ``even_batches`` the ranks that have none left
    in the last round get an item from the start again, which counts as padding altogether.

    Args:
        sampler: sampler to share, with the same items on every rank. An item may be an index, or a list of them.
        num_processes: number of ranks.
        process_index: this rank.
        even_batches: give every rank the same number of items.
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
        """Whether all ranks are sure to have the same number of steps in an epoch."""
        return self.num_processes == 1 or self.even_batches

    def __len__(self) -> int:
        return self.length_from(0)

    def length_from(self, position: int) -> int:
        """Number of items of this rank in an epoch that begins at ``position``."""
        plan = ShardPlan(len(self.sampler), 1, self.num_processes, even_batches=self.even_batches, start=position)
        return plan.steps(self.process_index)

    def _epoch(self, progress: EpochProgress, start: EpochStart) -> Iterator[Any]:
        with self.order.beginning(start.origin) as progress.origin:
            items = StreamSource(self.sampler, self.num_processes)
            items.skip(start.position)
        yield from self._announced(self._cut_items(items, progress), progress)

    def _cut_items(self, items: StreamSource, progress: EpochProgress) -> Iterator[_Cut]:
        position = progress.start
        for chunk in items.chunks(self.num_processes):
            position += len(chunk)
            if self.process_index < len(chunk):
                yield chunk[self.process_index], None
            elif self.even_batches:
                yield _repeated(items.head, self.process_index - len(chunk), 1)[0], 0
        progress.length = position
