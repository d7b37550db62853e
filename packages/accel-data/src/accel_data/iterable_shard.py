"""A rank's shard of an iterable data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset

from accel_state.arguments import check_flag, check_number, check_rank
from accel_state.errors import ConfigurationError

from ._torch_compat import pin_memory
from .shard_math import ShardPlan, per_process_batch_size, wrapped_ranges


@dataclass(slots=True)
class MarkedSample:
    """A sample of the last step, after that was completed with padding."""

    sample: Any
    is_real: bool  # False for padding
    tail: int  # samples in the last step, over all ranks, that are not padding


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of ``dataset`` that one rank gets, for a loader with batches of ``batch_size``.

    Every rank reads the whole stream and keeps the r-th slice of ``batch_size`` of each run of
    ``num_processes * batch_size`` samples. An incomplete last run is dropped (``drop_last``) or completed with samples
    from the start of the stream.

    Args:
        dataset: data set to shard; yields the same samples in the same order on every rank.
        batch_size: batch size of each rank; with ``split_batches`` the global one.
        drop_last: drop the samples of an incomplete last step.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: whether ``batch_size`` is the global one.

    Attributes:
        even_batches: complete the last run; otherwise the last ranks get fewer samples.
        marks: wrap the samples of a completed last run in :class:`MarkedSample`.

    Raises:
        ConfigurationError: with ``split_batches``, the batch size is not a multiple of ``num_processes``; or
            ``process_index`` is out of range.
    """

    even_batches: bool = True
    marks: bool = False

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
        check_number("batch_size", batch_size, at_least=1, whole=True)
        check_flag("drop_last", drop_last)
        check_flag("split_batches", split_batches)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.local_batch_size: int = per_process_batch_size(batch_size, num_processes) if split_batches else batch_size
        self.epoch: int = 0
        self._skip_samples = 0

    @property
    def step_size(self) -> int:
        """Samples of the stream per global step."""
        return self.local_batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch of the next iteration to the data set, if it has ``set_epoch``."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin_at(self, position: int) -> None:
        """Read and drop the first ``position`` samples of the stream in the next iteration."""
        self._skip_samples = position

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch, if the data set has a length."""
        plan = ShardPlan(
            len(self.dataset),  # type: ignore[arg-type]
            self.local_batch_size,
            self.num_processes,
            self.drop_last,
            self.even_batches,
        )
        if self.even_batches:
            return plan.steps(self.process_index) * plan.batch_size
        return plan.full_steps * plan.batch_size + plan.real_samples(self.process_index, plan.full_steps)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: the data set's __iter__ and a skip run when the loader begins, not with its first
        # batch.
        skip, self._skip_samples = self._skip_samples, 0
        samples = iter(self.dataset)
        if skip == 0:
            return self._own_samples(samples)
        head = list(islice(samples, self.step_size))
        for _ in islice(samples, max(0, skip - len(head))):
            pass
        return self._own_samples(chain(head[skip:], samples), head)

    def _own_samples(self, samples: Iterator[Any], head: list[Any] | None = None) -> Iterator[Any]:
        size, first = self.step_size, self.process_index * self.local_batch_size
        last = first + self.local_batch_size
        while chunk := list(islice(samples, size)):
            head = chunk if head is None else head
            if len(chunk) == size or not (self.drop_last or self.even_batches):
                yield from chunk[first:last]
            elif not self.drop_last:
                yield from self._completed(chunk, head, first, last)

    def _completed(self, chunk: list[Any], head: list[Any], first: int, last: int) -> Iterator[Any]:
        """Positions [first, last) of an incomplete last run followed by endless repetitions of ``head``."""
        tail = len(chunk)
        padding = wrapped_ranges(max(0, first - tail), max(0, last - tail), len(head))
        for sample in chunk[first:last]:
            yield MarkedSample(sample, True, tail) if self.marks else sample
        for sample in chain.from_iterable(head[run.start : run.stop] for run in padding):
            yield MarkedSample(sample, False, tail) if self.marks else sample


class StatefulIterableDatasetShard(IterableDatasetShard):
    """The shard of a data set that has ``state_dict`` and ``load_state_dict``.

    Between two batches of the loader the data set is at the end of a global step, so its state is the shard's state.
    """

    _pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict`` in the next iteration."""
        self._pending = state_dict

    def __iter__(self) -> Iterator[Any]:
        state, self._pending = self._pending, None
        if state is None:
            return super().__iter__()
        # The last step is completed from the start of the stream, which the resumed data set does not yield again.
        head = list(islice(iter(self.dataset), self.step_size))
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        return self._own_samples(iter(self.dataset), head)


@dataclass(slots=True)
class CountedBatch:
    """The batch of a last step that was completed with padding."""

    batch: Any  # result of the collate function
    real: int | None  # number of its samples that are not padding, which come first; None means all of them
    tail: int  # the same over all ranks; -1 if unknown

    def pin_memory(self, device: str | None = None) -> CountedBatch:
        """Copy the batch to pinned memory."""
        return CountedBatch(pin_memory(self.batch, device), self.real, self.tail)


class CountingCollate:
    """Collate function that also counts the samples that are not padding."""

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool) -> None:
        self.collate_fn = collate_fn
        self.batched = batched

    def __call__(self, samples: Any) -> Any:
        # A step is marked as a whole, so either all samples of a batch are MarkedSamples or none is.
        marked = samples[-1] if self.batched else samples
        if type(marked) is not MarkedSample:
            return self.collate_fn(samples)
        if not self.batched:
            # The number of samples in an item is unknown here: all of them count, or none.
            return CountedBatch(self.collate_fn(marked.sample), None if marked.is_real else 0, -1)
        real = sum(sample.is_real for sample in samples)
        return CountedBatch(self.collate_fn([sample.sample for sample in samples]), real, marked.tail)


def wants_epoch(dataset: Any) -> bool:
    """Return True if a data set has ``set_epoch``."""
    return hasattr(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset, "set_epoch")


def can_shard_at_source(dataset: Any, num_processes: int) -> bool:
    """Return True if an iterable data set has ``shard(num_shards, index)`` and at least one source per rank."""
    return callable(getattr(dataset, "shard", None)) and (source_count(dataset) or 0) >= num_processes


def source_count(dataset: Any) -> int | None:
    """Return the number of sources (files) of an iterable data set: its ``num_shards`` or ``n_shards``, if any."""
    count = getattr(dataset, "num_shards", None)
    if count is None:
        count = getattr(dataset, "n_shards", None)
    return count if isinstance(count, int) else None


def shard_at_source(dataset: Any, num_processes: int, process_index: int) -> Any:
    """Return the part of the data set that reads only this rank's sources."""
    accepted = inspect.signature(dataset.shard).parameters
    if not {"num_shards", "index"} <= set(accepted) and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        raise ConfigurationError(
            f"{type(dataset).__name__}.shard takes ({', '.join(accepted)}), but a data set that is sharded at the "
            "source must offer shard(num_shards, index). Rename the arguments, or remove num_shards so that each rank "
            "reads the stream and keeps its part."
        )
    return dataset.shard(num_shards=num_processes, index=process_index)


def is_already_split(dataset: Any) -> bool:
    """Return True if the data set reads only this rank's part.

    It has an attribute ``already_sharded = True``. The result of Hugging Face's ``split_dataset_by_node`` for
    iterable data is recognised too, and a pipeline of webdataset with ``split_by_node``.
    """
    if getattr(dataset, "already_sharded", False):
        return True
    stages = getattr(dataset, "pipeline", None)
    if isinstance(stages, list) and any(map(_is_split_by_node, stages)):
        return True
    return getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1


def _is_split_by_node(stage: Any) -> bool:
    """Return True if a stage is webdataset's split_by_node, among all ranks."""
    while isinstance(stage, partial):
        if stage.args or stage.keywords.get("group") is not None:
            return False
        stage = stage.func
    return getattr(stage, "__name__", None) == "split_by_node"
