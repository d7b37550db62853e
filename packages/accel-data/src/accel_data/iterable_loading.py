"""Iterating an iterable data set, from its start or from where a state was saved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from .adapter import loader_settings
from .epoch_rng import preserved_random_state
from .iterable_shard import IterableDatasetShard
from .layout import LoaderLayout
from .lookahead import ReadAheadWatch, Step, read_ahead_steps, unannounced_steps
from .resume_state import Iteration, ResumePoint, knows_position


class IterableLoading:
    """The part of a prepared loader that iterates an iterable data set."""

    base_dataloader: Any
    dataset: Any
    layout: LoaderLayout
    num_workers: int
    use_stateful_dataloader: bool

    if TYPE_CHECKING:

        def _open(self, iteration: Iteration, *, torch_only: bool = True) -> Iterator[Any]: ...
        def _batches_out(self, current: Iteration) -> int: ...
        def _units_a_batch(self) -> int: ...
        def _synchronized(self, steps: Iterator[Step], latest: Any = None) -> Iterator[Step]: ...

    def _iterable_steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        in_process = self.num_workers == 0
        snapshot = self.base_dataloader.state_dict if self.use_stateful_dataloader else None
        if in_process or snapshot:
            iteration.watch = ReadAheadWatch(partial(self._batches_out, iteration), in_process, snapshot)
        watch, resume = iteration.watch, iteration.resume
        if resume is None or not resume.position:
            batches = self._open(iteration, torch_only=False)
            self._drop(batches, iteration, skip)
        else:
            with preserved_random_state():
                batches = self._reopen(iteration, resume, skip)
                if watch is None:
                    # Read here, so that the workers are through with what is dropped before the loop begins.
                    batches = chain(list(islice(batches, 1)), batches)
                elif not skip:
                    watch.read_again(batches, resume.read_ahead)
        if self.layout.synchronize_steps:
            yield from self._synchronized(unannounced_steps(batches, watch), iteration.dropped)
        else:
            yield from read_ahead_steps(batches, watch)

    def _drop(self, batches: Iterator[Any], iteration: Iteration, count: int) -> None:
        """Read batches and drop them: an iterable data set has no other way to get past them."""
        for batch in islice(batches, count):
            if iteration.first_batch is None:
                iteration.first_batch = batch
            iteration.dropped = batch
        iteration.position = count * self._units_a_batch()

    def _reopen(self, iteration: Iteration, resume: ResumePoint, skip: int) -> Iterator[Any]:
        """Begin the epoch of an iterable data set again, and go to where it was left."""
        if skip or resume.unit == "steps":
            goes_there = not skip and knows_position(resume.source)
            if goes_there:
                self.base_dataloader.load_state_dict(resume.source)
            batches = self._open(iteration)
            self._drop(batches, iteration, 0 if goes_there else skip or resume.position)
        else:
            batches = self._reopen_at_sample(iteration, resume.position)
        iteration.position = iteration.position if skip else resume.position
        return batches

    def _reopen_at_sample(self, iteration: Iteration, position: int) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDatasetShard):
            self.dataset.begin_at(position)
            return self._open(iteration)
        batch_size = self.base_dataloader.batch_size or 1
        if position % batch_size == 0:
            batches = self._open(iteration)
            self._drop(batches, iteration, position // batch_size)
            return batches
        # A state of several ranks, continued on one: the position need not be at the end of one of its batches.
        whole = self.base_dataloader
        shard = IterableDatasetShard(self.dataset, batch_size, whole.drop_last)
        shard.even_batches = False
        shard.begin_at(position)
        self.base_dataloader = type(whole)(
            shard, batch_size=batch_size, drop_last=whole.drop_last, **loader_settings(whole)
        )
        try:
            return self._open(iteration)
        finally:
            self.base_dataloader = whole
