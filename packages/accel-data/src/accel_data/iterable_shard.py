"""A rank's share of an iterable data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from accel_state.errors import ConfigurationError

from .shard_math import ShardPlan, check_rank, per_process_batch_size, wrapped_ranges


class TailSample:
    """A sample of the last, completed step.

    Attributes:
        sample: the sample itself.
        is_real: False if it stands in for a missing one.
        tail: samples in that step, over all ranks, that are no padding.
    """

    __slots__ = ("is_real", "sample", "tail")

    def __init__(self, sample: Any, is_real: bool, tail: int) -> None:
        self.sample = sample
        self.is_real = is_real
        self.tail = tail


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of ``dataset`` that one rank gets, for a loader that makes batches of ``batch_size`` of them.

    Every rank reads the whole stream and keeps its part: of each run of ``num_processes * batch_size`` samples the r-th
    slice of ``batch_size``. The last run is dropped (``drop_last``) or completed with samples from the start of the
    stream.

    Args:
        dataset: data set to share, with the same samples in the same order on every rank.
        batch_size: batch size of the loader on each rank; with ``split_batches`` that of all ranks together.
        drop_last: leave out the samples of the last step if they do not fill it.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: whether ``batch_size`` counts the samples of all ranks.

    Attributes:
        even_batches: whether the last run is completed; otherwise the last ranks get fewer samples.
        mark_tail: wrap the samples of a completed last run in :class:`TailSample`.

    Raises:
        ConfigurationError: with ``split_batches``, the batch size is not a multiple of ``num_processes``; or there is
            no such rank.
    """

    even_batches: bool = True
    mark_tail: bool = False

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        check_rank(num_processes, process_index)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.local_batch_size = per_process_batch_size(batch_size, num_processes) if split_batches else batch_size
        self.epoch = 0
        self._skip_samples = 0

    @property
    def step_size(self) -> int:
        """Samples of the stream that one global step takes."""
        return self.local_batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch of the next iteration on to the data set, if it wants to know."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin_at(self, position: int) -> None:
        """Leave out the first ``position`` samples of the stream, in the next iteration only. They are read and
        dropped.
        """
        self._skip_samples = position

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, if the data set knows its length."""
        plan = ShardPlan(
            len(self.dataset),  # type: ignore[arg-type]
            self.local_batch_size,
            self.num_processes,
            self.drop_last,
            self.even_batches,
        )
        steps = plan.steps(self.process_index)
        if self.even_batches or steps == plan.full_steps:
            return steps * plan.batch_size
        return plan.full_steps * plan.batch_size + plan.real_samples(self.process_index, plan.full_steps)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: the data set's own __iter__, and a skip, run when the loader begins and not with its
        # first batch.
        skip, self._skip_samples = self._skip_samples, 0
        samples = iter(self.dataset)
        return self._share(samples) if skip == 0 else self._share_from(samples, skip)

    def _share_from(self, samples: Iterator[Any], skip: int) -> Iterator[Any]:
        """The share of what follows the first ``skip`` samples, which are read here: a stream cannot be entered in the
        middle.
        """
        head = list(islice(samples, self.step_size))
        for _ in islice(samples, max(0, skip - len(head))):
            pass
        return self._share(chain(head[skip:], samples), head)

    def _share(self, samples: Iterator[Any], head: list[Any] | None = None) -> Iterator[Any]:
        size, first = self.step_size, self.process_index * self.local_batch_size
        last = first + self.local_batch_size
        while chunk := list(islice(samples, size)):
            head = chunk if head is None else head
            if len(chunk) == size:
                yield from chunk[first:last]
            elif not self.drop_last and self.even_batches:
                yield from self._completed(chunk, head, first, last)
            elif not self.drop_last:
                yield from chunk[first:last]

    def _completed(self, chunk: list[Any], head: list[Any], first: int, last: int) -> Iterator[Any]:
        """Positions [first, last) of a last run that is too short, followed by the start of the stream as often as it
        takes.
        """
        tail = len(chunk)
        padding = wrapped_ranges(max(0, first - tail), max(0, last - tail), len(head))
        for sample in chunk[first:last]:
            yield TailSample(sample, True, tail) if self.mark_tail else sample
        for sample in chain.from_iterable(head[run.start : run.stop] for run in padding):
            yield TailSample(sample, False, tail) if self.mark_tail else sample


class StatefulIterableDatasetShard(IterableDatasetShard):
    """The share of a data set that can save and load its own position (``state_dict`` and ``load_state_dict``).

    Between two batches of the loader the data set stands exactly at the end of a global step, so its state is the state
    of the shard.
    """

    _pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The data set's own state."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there in the next iteration."""
        self._pending = state_dict

    def __iter__(self) -> Iterator[Any]:
        state, self._pending = self._pending, None
        if state is None:
            return super().__iter__()
        # The last step is completed from the start of the stream, which the data set will not come by again.
        head = list(islice(iter(self.dataset), self.step_size))
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        return self._share(iter(self.dataset), head)


class CountedBatch:
    """The batch of a completed last step.

    Attributes:
        batch: what the loader's collate function made.
        real: samples of it that are no padding; they come first. None means all of them.
        tail: the same, over all ranks; -1 if it is not known.
    """

    __slots__ = ("batch", "real", "tail")

    def __init__(self, batch: Any, real: int | None, tail: int) -> None:
        self.batch = batch
        self.real = real
        self.tail = tail

    def pin_memory(self, device: str | None = None) -> CountedBatch:
        """The same, with the batch in pinned memory."""
        return CountedBatch(pin_memory(self.batch, device), self.real, self.tail)


class CountingCollate:
    """Collate samples with ``collate_fn``, and count those that are no padding.

    Args:
        collate_fn: the loader's own.
        batched: whether it is given a list of samples (False for ``batch_size=None``).
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(self, samples: Any) -> Any:
        # A step is completed as a whole, so a batch holds such samples only, or none.
        marked = samples[-1] if self.batched else samples
        if type(marked) is not TailSample:
            return self.collate_fn(samples)
        if not self.batched:
            # How many samples an item stands for is not known here: all of them count, or none.
            return CountedBatch(self.collate_fn(marked.sample), None if marked.is_real else 0, -1)
        real = sum(sample.is_real for sample in samples)
        return CountedBatch(self.collate_fn([sample.sample for sample in samples]), real, marked.tail)


def wants_epoch(dataset: Any) -> bool:
    """Whether a data set is to be told the epoch."""
    return hasattr(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset, "set_epoch")


def can_shard_at_source(dataset: Any, num_processes: int) -> bool:
    """Whether an iterable data set can give each of ``num_processes`` ranks sources of its own to read.

    It offers ``shard(num_shards, index)``, and says in ``num_shards`` (or ``n_shards``) that it has at least one source
    a rank.
    """
    return callable(getattr(dataset, "shard", None)) and (source_count(dataset) or 0) >= num_processes


def source_count(dataset: Any) -> int | None:
    """The number of sources (files, ...) behind an iterable data set, or None where it does not say."""
    count = getattr(dataset, "num_shards", None)
    if count is None:
        count = getattr(dataset, "n_shards", None)
    return count if isinstance(count, int) else None


def shard_at_source(dataset: Any, num_processes: int, process_index: int) -> Any:
    """The part of the data set whose sources belong to this rank.

    Raises:
        ConfigurationError: its ``shard`` method has not the arguments ``num_shards`` and ``index``.
    """
    accepted = inspect.signature(dataset.shard).parameters
    if not {"num_shards", "index"} <= set(accepted) and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        raise ConfigurationError(
            f"{type(dataset).__name__}.shard takes ({', '.join(accepted)}), but a data set that is split at the "
            "source must offer "
            "shard(num_shards, index). Rename the arguments, or remove num_shards so that each rank reads the stream "
            "and keeps its part."
        )
    return dataset.shard(num_shards=num_processes, index=process_index)


def is_already_split(dataset: Any) -> bool:
    """Whether the data set says that it holds this rank's part only.

    It says so with an attribute ``already_sharded = True``. A Hugging Face data set that went through
    ``split_dataset_by_node`` is recognised too.
    """
    if getattr(dataset, "already_sharded", False):
        return True
    return getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1
