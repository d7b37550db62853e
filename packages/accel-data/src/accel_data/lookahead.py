"""Batches as a loop needs them: each with whether it is the last one, and how much of it is padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_state.collectives.single import Collectives

from .batch_shard import EpochProgress
from .epoch_rng import GlobalRandomState
from .iterable_shard import CountedBatch

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
    """Keeps what is needed to read the batches again that are read ahead.

    A data set that draws random numbers draws those of the next batches before the loop has worked on the current one.
    To read them again after a restart, with the same numbers, takes the generators as they stood before the first of
    them. Copying the states of numpy and python is slow, so whether the data set uses them at all is looked at in the
    1st, 32nd, 1024th... batch.

    Args:
        handed_out: tells how many batches of this iteration were handed out.
        random_numbers: keep the generators; of use where the data is read in this process.
        snapshot: state of a loader that keeps its own.
    """

    def __init__(
        self,
        handed_out: Callable[[], int],
        random_numbers: bool = True,
        snapshot: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._handed_out = handed_out
        self._random_numbers = random_numbers
        self._snapshot = snapshot
        # What stood before each batch that is not handed out yet, the number of the first of them, and those that were
        # read to resume.
        self._before: deque[tuple[GlobalRandomState | torch.Tensor | None, dict[str, Any]]] = deque()
        self._first = 0
        self._already_read: deque[Any] = deque()
        self._fetches = 0
        self._next_look = 1
        self._beyond_torch = False

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, fetched by this watch."""
        while (batch := self.fetch(batches)) is not _END:
            yield batch

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch, or the end marker."""
        return self._already_read.popleft() if self._already_read else self._read(batches)

    def read_again(self, batches: Iterator[Any], read_ahead: dict[str, Any]) -> None:
        """Read the batches that a state was saved ahead of, each under the random numbers it was once read under.

        Args:
            batches: those that follow in the epoch.
            read_ahead: what :meth:`read_ahead` returned then.
        """
        for before in read_ahead.get("generators", ()):
            GlobalRandomState.from_plain(before).restore()
            self._already_read.append(self._read(batches))

    def _read(self, batches: Iterator[Any]) -> Any:
        handed_out = self._handed_out()
        while self._first < handed_out and self._before:
            self._before.popleft()
            self._first += 1
        source = {} if self._snapshot is None else self._snapshot()
        if not self._random_numbers:
            self._before.append((None, source))
            return next(batches, _END)
        self._fetches += 1
        if self._beyond_torch or self._fetches == self._next_look:
            return self._read_looking(batches, source)
        self._before.append((_torch_state(), source))
        return next(batches, _END)

    def _read_looking(self, batches: Iterator[Any], source: dict[str, Any]) -> Any:
        before = GlobalRandomState.capture()
        self._before.append((before, source))
        batch = next(batches, _END)
        if not self._beyond_torch:
            self._next_look *= 32
            self._beyond_torch = not before.same_beyond_torch(GlobalRandomState.capture())
        return batch

    def _waiting(self) -> int:
        """Batches, or ends, that were read and not handed out."""
        return self._first + len(self._before) - self._handed_out()

    def read_ahead(self) -> dict[str, Any]:
        """The generators before each batch that was read ahead: tensors, numbers, lists and tuples only."""
        waiting = self._waiting()
        if waiting <= 0 or not self._random_numbers:
            return {}
        return {"generators": [_to_plain(before) for before, _ in list(self._before)[-waiting:]]}

    def source(self) -> dict[str, Any]:
        """The loader's own state before the first batch that was read ahead; empty if it keeps none."""
        if not self._before:
            return {}
        return self._before[-max(1, self._waiting())][1]


def _to_plain(before: GlobalRandomState | torch.Tensor | None) -> dict[str, Any]:
    return before.to_plain() if isinstance(before, GlobalRandomState) else {"torch": before}


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


def synchronized_steps(steps: Iterator[Step], collectives: Collectives, latest: Any = None) -> Iterator[Step]:
    """The steps of ranks that read sources of their own, made equal in number: one small all-reduce a step.

    A rank that has no batch left gets its latest one again, all of it padding, until every rank is through. A rank that
    never had one is given one of another rank's.

    Args:
        steps: those of this rank.
        collectives: those of the run.
        latest: the batch before these, where the epoch is entered in the middle.

    Raises:
        RuntimeError: reading failed on another rank. The rank where it failed raises its own error.
    """
    current = _fetch_step(steps, collectives)
    holders = _agree(collectives, current)
    template: Any = None
    if 0 < holders < collectives.world_size:
        exchanged = _exchange_template(collectives, current)
        template = exchanged if latest is None else latest
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
        raise RuntimeError(
            f"rank {collectives.rank} stops iterating, because reading the data failed on another rank; see its error"
        )
    return holders


def _exchange_template(collectives: Collectives, step: Step | None) -> Any:
    """A batch of the first rank that has one, on every rank."""
    holds = collectives.all_gather(torch.tensor(step is not None)).tolist()
    return collectives.broadcast_object(None if step is None else step[0], holds.index(True))


def unannounced_steps(batches: Iterator[Any], watch: ReadAheadWatch | None) -> Iterator[Step]:
    """Steps without knowing the last one, for :func:`synchronized_steps`, which reads ahead itself."""
    while (batch := next(batches, _END) if watch is None else watch.fetch(batches)) is not _END:
        yield batch, False, None, -1
