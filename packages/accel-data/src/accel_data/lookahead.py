"""Iterators over the steps of a loader: each batch with whether it is the last one, and how much of it is padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_state.collectives.single import Collectives
from accel_state.operations.nested import find_batch_size

from .batch_shard import EpochProgress
from .iterable_shard import CountedBatch
from .rng_state import RngStates, capture_rng, from_plain, restore_rng, to_plain

# One step of a loader on one rank, as a plain tuple because it is made for every batch:
# - the batch of the torch loader;
# - whether it is the last step;
# - samples of the batch that are not padding, or None if it has no padding;
# - samples of all ranks in this step that are not padding, or -1 if a gather has nothing to drop.
Step = tuple[Any, bool, "int | None", int]

_END = object()
_torch_state = torch.default_generator.get_state


def map_style_steps(batches: Iterator[Any], progress: EpochProgress) -> Iterator[Step]:
    """Return steps of map-style data: the sampler knows the last batch in advance, so nothing is read ahead."""
    real = progress.real
    for step, batch in enumerate(batches):
        yield batch, step + 1 == progress.total, real.pop(step, None) if real else None, progress.remainder


class ReadAheadTracker:
    """Saves the states needed to read batches again that were read ahead of the loop.

    A data set that draws random numbers draws those of the next batches before the loop has processed the current one.
    Reading these batches again after a restart, with the same numbers, takes the generator states before the first of
    them. Copying the states of numpy and python is slow, so whether the data set uses them is checked only in the 1st,
    32nd, 1024th... batch.
    """

    def __init__(
        self,
        handed_out: Callable[[], int],
        track_rng: bool = True,
        snapshot: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._handed_out = handed_out  # returns the number of batches of this iteration that were handed out
        self._track_rng = track_rng  # whether this process reads the data
        self._snapshot = snapshot  # returns the state of a StatefulDataLoader
        # The states before each batch that is not handed out yet, the number of the first of these batches, and
        # batches that were read to resume.
        self._before: deque[tuple[RngStates | torch.Tensor | None, dict[str, Any]]] = deque()
        self._first = 0
        self._already_read: deque[Any] = deque()
        self._fetches = 0
        self._next_check = 1
        self._beyond_torch = False

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, fetched with :meth:`fetch`."""
        while (batch := self.fetch(batches)) is not _END:
            yield batch

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or the end marker."""
        return self._already_read.popleft() if self._already_read else self._read(batches)

    def read_again(self, batches: Iterator[Any], read_ahead: dict[str, Any]) -> None:
        """Read the batches that were read ahead when a state was saved, each with its original random numbers."""
        for before in read_ahead.get("generators", ()):
            restore_rng(from_plain(before))
            self._already_read.append(self._read(batches))

    def _read(self, batches: Iterator[Any]) -> Any:
        handed_out = self._handed_out()
        while self._first < handed_out and self._before:
            self._before.popleft()
            self._first += 1
        source = {} if self._snapshot is None else self._snapshot()
        if not self._track_rng:
            self._before.append((None, source))
            return next(batches, _END)
        self._fetches += 1
        if self._beyond_torch or self._fetches == self._next_check:
            return self._read_checking(batches, source)
        self._before.append((_torch_state(), source))
        return next(batches, _END)

    def _read_checking(self, batches: Iterator[Any], source: dict[str, Any]) -> Any:
        """Read a batch and check whether that moved the generators of numpy or python."""
        before = capture_rng()
        self._before.append((before, source))
        batch = next(batches, _END)
        if not self._beyond_torch:
            self._next_check *= 32
            after = capture_rng()
            self._beyond_torch = before["numpy"] != after["numpy"] or before["python"] != after["python"]
        return batch

    def _waiting(self) -> int:
        """Return the number of batches (or ends) that were read and not handed out."""
        return self._first + len(self._before) - self._handed_out()

    def read_ahead(self) -> dict[str, Any]:
        """Return the generator states before each batch read ahead: tensors, numbers, lists and tuples only."""
        waiting = self._waiting()
        if waiting <= 0 or not self._track_rng:
            return {}
        states = [before for before, _ in list(self._before)[-waiting:]]
        return {"generators": [to_plain(s) if isinstance(s, dict) else {"torch": s} for s in states]}

    def source(self) -> dict[str, Any]:
        """Return the loader's own state before the first batch that was read ahead; empty if it has none."""
        if not self._before:
            return {}
        return self._before[-max(1, self._waiting())][1]


def _size_if_short(batch: Any, full: int | None) -> int | None:
    """Return the number of samples of a batch that is smaller than a full one; None for others.

    Callers gather values that they have repeated for a full batch (Transformers' Trainer does so with the loss), so a
    gather has to know how many of them are samples.
    """
    if full is None:
        return None
    try:
        size = find_batch_size(batch)
    except (TypeError, ValueError):  # no tensors
        return None
    return size if size < full else None


def lookahead_steps(
    batches: Iterator[Any], tracker: ReadAheadTracker | None, full: int | None = None
) -> Iterator[Step]:
    """Yield the steps of iterable data, whose last batch is only known by reading one batch ahead.

    ``full`` is the size of a full batch on a single process, whose last batch may be smaller.
    """
    upcoming = next(batches, _END) if tracker is None else tracker.fetch(batches)
    while upcoming is not _END:
        batch = upcoming
        upcoming = next(batches, _END) if tracker is None else tracker.fetch(batches)
        last = upcoming is _END
        if type(batch) is CountedBatch:
            yield batch.batch, last, batch.real, batch.tail
        else:
            yield batch, last, None, (_size_if_short(batch, full) or -1) if last else -1


def open_ended_steps(batches: Iterator[Any], tracker: ReadAheadTracker | None) -> Iterator[Step]:
    """Yield the steps that do not know the last one, for :func:`synchronized_steps`, which reads ahead itself."""
    while (batch := next(batches, _END) if tracker is None else tracker.fetch(batches)) is not _END:
        yield batch, False, None, -1


def synchronized_steps(steps: Iterator[Step], collectives: Collectives, latest: Any = None) -> Iterator[Step]:
    """Give ranks that read separate sources the same number of steps, with one small all-reduce per step.

    A rank without a next batch repeats its latest one (``latest`` before the first step) as padding until every rank is
    done. A rank that never had a batch repeats one of another rank. An error on one rank stops all.
    """
    current = _fetch_step(steps, collectives)
    ranks_with_batch = _count_ranks_with_batch(collectives, current)
    template: Any = None
    if 0 < ranks_with_batch < collectives.world_size:
        exchanged = _exchange_template(collectives, current)
        template = exchanged if latest is None else latest
    while ranks_with_batch:
        following = _fetch_step(steps, collectives) if current is not None else None
        ranks_with_batch = _count_ranks_with_batch(collectives, following)
        real: int | None = 0
        if current is not None:
            template, _, real, _ = current
        yield template, ranks_with_batch == 0, real, -1
        current = following


# Added to the number of ranks that have a batch: a negative sum means that a rank failed.
_FAILED = -(2**40)


def _fetch_step(steps: Iterator[Step], collectives: Collectives) -> Step | None:
    try:
        return next(steps, None)
    except Exception:
        # The other ranks are about to wait in the all-reduce of this step.
        collectives.all_reduce(torch.tensor(_FAILED))
        raise


def _count_ranks_with_batch(collectives: Collectives, step: Step | None) -> int:
    count = int(collectives.all_reduce(torch.tensor(0 if step is None else 1)))
    if count < 0:
        raise RuntimeError(f"rank {collectives.rank} stops because another rank failed to read data; see its error")
    return count


def _exchange_template(collectives: Collectives, step: Step | None) -> Any:
    """Broadcast a batch of the first rank that has one."""
    has_batch = collectives.all_gather(torch.tensor(step is not None)).tolist()
    return collectives.broadcast_object(None if step is None else step[0], has_batch.index(True))
