"""Batches as a loop needs them: each with whether it is the last one, and how much of it is padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from accel_state.collectives.single import Collectives

from .batch_shard import EpochProgress
from .iterable import CountedBatch
from .randomness import GlobalRandomState


class Step(NamedTuple):
    """One step of a loader on one rank.

    Attributes:
        batch: what the loader made.
        last: whether no step follows.
        real: samples of the batch that are no padding; None if it holds none.
        remainder: samples of all ranks in this step that are no padding; -1 if there is nothing to leave out.
    """

    batch: Any
    last: bool
    real: int | None = None
    remainder: int = -1


_END = object()


def announced_steps(batches: Iterator[Any], progress: EpochProgress) -> Iterator[Step]:
    """Steps of a map-style data set: its sampler knows the last batch before it is read, so nothing is read ahead."""
    step = 0
    for batch in batches:
        real = progress.real.pop(step, None) if progress.real else None
        step += 1
        last = step == progress.total
        yield Step(batch, last, real, progress.remainder)


class ReadAheadWatch:
    """Keeps what is needed to read the batch again that is read ahead.

    A data set that draws random numbers draws those of the next batch before the loop has worked on the current one. To read that batch
    again after a restart, with the same numbers, takes the generators as they stood then. Copying the states of numpy and python is slow,
    so whether the data set uses them at all is looked at in the 1st, 2nd, 4th, 8th... batch.

    Args:
        random_numbers: keep the generators; of use where the data is read in this process.
        snapshot: state of a loader that keeps its own.

    Attributes:
        before: the generators as they stood before the latest batch was read.
        source: the loader's own state at that time.
    """

    def __init__(self, random_numbers: bool, snapshot: Callable[[], dict[str, Any]] | None = None) -> None:
        self.before: GlobalRandomState | None = None
        self.source: dict[str, Any] = {}
        self._random_numbers = random_numbers
        self._snapshot = snapshot
        self._fetches = 0
        self._beyond_torch = False

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch, or the end marker."""
        if self._snapshot is not None:
            self.source = self._snapshot()
        return self._fetch_watched(batches) if self._random_numbers else next(batches, _END)

    def _fetch_watched(self, batches: Iterator[Any]) -> Any:
        self._fetches += 1
        look = not self._beyond_torch and self._fetches & (self._fetches - 1) == 0
        self.before = before = GlobalRandomState.capture(torch_only=not (look or self._beyond_torch))
        batch = next(batches, _END)
        if look:
            self._beyond_torch = not before.same_beyond_torch(GlobalRandomState.capture())
        return batch


def read_ahead_steps(batches: Iterator[Any], watch: ReadAheadWatch | None) -> Iterator[Step]:
    """Steps of an iterable data set: one batch is read ahead, which is the only way to know the last one.

    Args:
        batches: of the loader.
        watch: for a data set that is read in this process; None when workers read it.
    """
    upcoming = next(batches, _END) if watch is None else watch.fetch(batches)
    while upcoming is not _END:
        batch = upcoming
        upcoming = next(batches, _END) if watch is None else watch.fetch(batches)
        last = upcoming is _END
        if type(batch) is CountedBatch:
            yield Step(batch.batch, last, batch.real, batch.tail)
        else:
            yield Step(batch, last)


def synchronized_steps(steps: Iterator[Step], collectives: Collectives) -> Iterator[Step]:
    """The steps of ranks that read sources of their own, made equal in number: one small all-reduce a step.

    A rank that has no batch left gets its latest one again, all of it padding, until every rank is through. A rank that never had one is
    given one of another rank's.

    Raises:
        RuntimeError: reading failed on another rank. The rank where it failed raises its own error.
    """
    current = _fetch_step(steps, collectives)
    holders = _agree(collectives, current)
    template: Any = None
    if 0 < holders < collectives.world_size:
        template = _exchange_template(collectives, current)
    while holders:
        following = _fetch_step(steps, collectives) if current is not None else None
        next_holders = _agree(collectives, following)
        if current is None:
            yield Step(template, next_holders == 0, 0)
        else:
            template = current.batch
            yield Step(current.batch, next_holders == 0, current.real)
        current, holders = following, next_holders


# Added to the count of ranks that have a batch: any sum below zero means that a rank failed.
_FAILED = -(2**40)


def _fetch_step(steps: Iterator[Step], collectives: Collectives) -> Step | None:
    try:
        return next(steps, None)
    except Exception:
        # The others are about to wait in the all-reduce of this step.
        collectives.all_reduce(torch.tensor(_FAILED))
        raise


def _agree(collectives: Collectives, step: Step | None) -> int:
    """Number of ranks that have a batch."""
    holders = int(collectives.all_reduce(torch.tensor(0 if step is None else 1)))
    if holders < 0:
        raise RuntimeError(f"rank {collectives.rank} stops iterating, because reading the data failed on another rank; see its error")
    return holders


def _exchange_template(collectives: Collectives, step: Step | None) -> Any:
    """A batch of the first rank that has one, on every rank."""
    holds = collectives.all_gather(torch.tensor(step is not None)).tolist()
    return collectives.broadcast_object(None if step is None else step.batch, holds.index(True))


def unannounced_steps(batches: Iterator[Any], watch: ReadAheadWatch | None) -> Iterator[Step]:
    """Steps without knowing the last one, for :func:`synchronized_steps`, which reads ahead itself."""
    while (batch := next(batches, _END) if watch is None else watch.fetch(batches)) is not _END:
        yield Step(batch, False)
