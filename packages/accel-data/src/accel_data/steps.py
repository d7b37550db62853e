"""Batches as a loop needs them: each with whether it is the last one, and how much of it is padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_state.collectives.single import Collectives

from .batch_shard import EpochProgress
from .iterable import CountedBatch
from .randomness import GlobalRandomState

# One step of a loader on one rank, as a plain tuple because it is made for every batch:
# - the batch that the loader made;
# - whether no step follows;
# - samples of the batch that are no padding, or None if it holds none;
# - samples of all ranks in this step that are no padding, or -1 if there is nothing to leave out after a gather.
Step = tuple[Any, bool, "int | None", int]

_END = object()
_torch_state = torch.default_generator.get_state


def announced_steps(batches: Iterator[Any], progress: EpochProgress) -> Iterator[Step]:
    """Steps of a map-style data set: its sampler knows the last batch before it is read, so nothing is read ahead."""
    real = progress.real
    for step, batch in enumerate(batches):
        yield batch, step + 1 == progress.total, real.pop(step, None) if real else None, progress.remainder


class ReadAheadWatch:
    """Keeps what is needed to read the batch again that is read ahead.

    A data set that draws random numbers draws those of the next batch before the loop has worked on the current one. To read that batch
    again after a restart, with the same numbers, takes the generators as they stood then. Copying the states of numpy and python is slow,
    so whether the data set uses them at all is looked at in the 1st, 32nd, 1024th... batch.

    Args:
        random_numbers: keep the generators; of use where the data is read in this process.
        snapshot: state of a loader that keeps its own.

    Attributes:
        before: the generators as they stood before the latest batch was read; the state of torch's alone if the others were not used.
        source: the loader's own state at that time.
    """

    def __init__(self, random_numbers: bool, snapshot: Callable[[], dict[str, Any]] | None = None) -> None:
        self.before: GlobalRandomState | torch.Tensor | None = None
        self.source: dict[str, Any] = {}
        self._random_numbers = random_numbers
        self._snapshot = snapshot
        self._fetches = 0
        self._next_look = 1
        self._beyond_torch = False

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch, or the end marker."""
        if self._snapshot is not None:
            self.source = self._snapshot()
        if not self._random_numbers:
            return next(batches, _END)
        self._fetches += 1
        if self._beyond_torch or self._fetches == self._next_look:
            return self._fetch_looking(batches)
        self.before = _torch_state()
        return next(batches, _END)

    def _fetch_looking(self, batches: Iterator[Any]) -> Any:
        before = self.before = GlobalRandomState.capture()
        batch = next(batches, _END)
        if not self._beyond_torch:
            self._next_look *= 32
            self._beyond_torch = not before.same_beyond_torch(GlobalRandomState.capture())
        return batch

    def read_ahead(self) -> dict[str, Any]:
        """The generators before the latest batch was read: tensors, numbers and tuples only; empty if they are not kept."""
        if isinstance(self.before, torch.Tensor):
            return {"torch": self.before}
        return {} if self.before is None else self.before.to_plain()


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
            yield batch.batch, last, batch.real, batch.tail
        else:
            yield batch, last, None, -1


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
            yield template, next_holders == 0, 0, -1
        else:
            template, _, real, _ = current
            yield template, next_holders == 0, real, -1
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
    return collectives.broadcast_object(None if step is None else step[0], holds.index(True))


def unannounced_steps(batches: Iterator[Any], watch: ReadAheadWatch | None) -> Iterator[Step]:
    """Steps without knowing the last one, for :func:`synchronized_steps`, which reads ahead itself."""
    while (batch := next(batches, _END) if watch is None else watch.fetch(batches)) is not _END:
        yield batch, False, None, -1
