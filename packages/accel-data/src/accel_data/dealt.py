"""A loader whose global steps are dealt to however many replicas there are, again for a step that was not committed.

The samples of a global step, their order and every random number drawn for them depend on the seed, the epoch and the
step, not on which replicas compute it: a step has a fixed number of shards, and a replica computes some of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from accel_state.errors import ConfigurationError

from .adapter import loader_settings
from .batch_shard import BatchSamplerShard
from .lookahead import Step
from .resume_state import Iteration, ResumePoint
from .samplers import SequentialSource, random_access_source
from .shard import DataLoaderShard
from .shard_math import ShardPlan, per_process_batch_size

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def unit_seed(seed: int, epoch: int, step: int, shard: int) -> int:
    """The seed of the random numbers that a shard of a step draws (splitmix64): 63 bits."""
    state = seed
    for number in (epoch, step, shard):
        state = (state + _MIX[0] * (number + 1)) % 2**64
        state = ((state ^ (state >> 30)) * _MIX[1]) % 2**64
        state = ((state ^ (state >> 27)) * _MIX[2]) % 2**64
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True)
class DealtBatch:
    """The place of a batch in its global step.

    Attributes:
        shard: the shard that it belongs to.
        index: its position in the accumulation window.
        window: batches of each shard in the window.
        is_last: whether it is the last one that this replica computes in the step.
        counts: whether its gradients are used; False on a replica that only stands by.
    """

    shard: int
    index: int
    window: int
    is_last: bool
    counts: bool

    @property
    def ends_shard(self) -> bool:
        """Whether it is the last batch of its shard in this step."""
        return self.index + 1 == self.window


class Dealer(Protocol):
    """What a :class:`DealtLoader` asks the strategy that deals steps."""

    num_shards: int
    """Shards of a global step."""
    seed: int
    """Seed of the random numbers drawn in a step; the same on all replicas."""

    @property
    def is_training(self) -> bool:
        """Whether an iteration that begins now trains, so that its steps are dealt."""

    @property
    def window(self) -> int:
        """Batches of each shard in a global step (gradient accumulation)."""

    def open_step(self, loader: Any) -> Sequence[int]:
        """Wait for the replicas of the next step. It may load the state of another replica, loaders included.

        Returns:
            The shards that this replica computes; empty if it only stands by.
        """

    def begin_batch(self, batch: DealtBatch) -> None:
        """Called before each batch is handed out."""

    def end_step(self, loader: Any) -> None:
        """Called after the last batch of a step; raises if the loop has not voted on it."""


@dataclass
class _Epoch:
    """The order of one epoch, and the division of its samples into steps and shards."""

    key: tuple[int, int]
    source: SequentialSource
    plan: ShardPlan

    @property
    def steps(self) -> int:
        return self.plan.steps(0)

    def indices(self, step: int, shard: int) -> list[Any]:
        """The samples of a shard in a step: a function of the epoch's order only."""
        return list(chain.from_iterable(self.source.take(run.start, run.stop) for run in self.plan.ranges(shard, step)))


@dataclass
class _Reader:
    """Reads batches in the order in which this replica is dealt them."""

    shards: tuple[int, ...]
    batches: Iterator[Any]
    upcoming: int  # the step of the next batch
    epoch: tuple[int, int] = field(default=(0, 0))

    def continues(self, epoch: tuple[int, int], step: int, shards: tuple[int, ...]) -> bool:
        return (self.epoch, self.upcoming, self.shards) == (epoch, step, shards)


class _SeededSamples(Dataset[Any]):
    """Reads the samples of a batch with the random generators of this process or worker set to the batch's seed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: tuple[int, list[Any]]) -> Any:
        seed, indices = batch
        seed_generators(seed)
        read = getattr(self.dataset, "__getitems__", None)
        return read(indices) if callable(read) else [self.dataset[index] for index in indices]


def seed_generators(seed: int) -> None:
    """Set the generators of Python, NumPy and torch, from which data sets draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class DealtLoader(DataLoaderShard):
    """A loader of map-style data whose training iterations are dealt step by step; see :func:`deal_steps`.

    Other iterations, such as an evaluation, read all samples on every replica.
    """

    _dealer: Dealer
    _split_batches: bool
    _even_batches: bool
    _at: tuple[int, int] | None  # epoch, and its first step that is not committed; None before the first training
    _epoch: _Epoch | None
    _reader: _Reader | None

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        if not self._dealer.is_training:
            return super()._steps(iteration, skip)
        if skip:
            raise ConfigurationError(
                f"skip_first_batches(loader, {skip}) has no effect on steps that are dealt to replicas. Continue with "
                "accelerator.resume() or load_state, which restore the position."
            )
        if self._at is None or self._at[0] < iteration.epoch:
            self._at = (iteration.epoch, 0)
        return self._dealt_steps(iteration.epoch)

    def _dealt_steps(self, epoch: int) -> Iterator[Step]:
        dealer = self._dealer
        while self._at is not None and self._at[0] == epoch and self._at[1] < self._order(epoch).steps:
            before = self._at
            shards = tuple(dealer.open_step(self))
            if self._at != before:
                continue  # this replica had fallen behind, and has the state of another one now
            yield from self._step_batches(self._order(epoch), before[1], shards)
            dealer.end_step(self)
        self._reader = None

    def _step_batches(self, order: _Epoch, step: int, shards: tuple[int, ...]) -> Iterator[Step]:
        """The batches that this replica computes in the global step that begins at ``step``."""
        dealer, total = self._dealer, order.steps
        window = min(dealer.window, total - step)
        counts, shards = bool(shards), shards or (0,)
        if self._reader is None or not self._reader.continues(order.key, step, shards):
            self._reader = self._read_from(order, step, shards)
        reader = self._reader
        reader.upcoming = -1  # in the middle of a step
        for shard in shards:
            for index in range(window):
                batch = next(reader.batches)
                torch.manual_seed(unit_seed(dealer.seed ^ 1, order.key[0], step + index, shard))
                is_last = shard == shards[-1] and index + 1 == window
                dealer.begin_batch(DealtBatch(shard, index, window, is_last, counts))
                last = step + index + 1 == total
                real = order.plan.real_samples(shard, total - 1) if last and order.plan.tail else None
                yield batch, last, real, order.plan.remainder if last else -1
        reader.upcoming = step + window

    def _read_from(self, order: _Epoch, step: int, shards: tuple[int, ...]) -> _Reader:
        settings = {**loader_settings(self.base_dataloader), "generator": torch.Generator()}
        settings.pop("persistent_workers", None)
        settings.pop("snapshot_every_n_steps", None)
        loader: DataLoader[Any] = DataLoader(
            _SeededSamples(self.dataset), batch_sampler=self._units(order, step, shards), **settings
        )
        return _Reader(shards, iter(loader), step, order.key)

    def _units(self, order: _Epoch, step: int, shards: tuple[int, ...]) -> Any:
        return _Units(order, step, shards, self._dealer.window, self._dealer.seed)

    def _order(self, epoch: int) -> _Epoch:
        sampler: Any = self.sampler
        key = epoch, int(getattr(sampler, "initial_seed", 0))
        if self._epoch is None or self._epoch.key != key:
            sharded = self._sharded
            source = None
            if isinstance(sharded, BatchSamplerShard) and sharded.is_plain:
                source = random_access_source(sharded.sampler)
            if source is None:
                raise ConfigurationError(
                    "steps are dealt to replicas from a data set with a length, in the order of a SequentialSampler or "
                    f"a RandomSampler without replacement; this loader has a {type(self.dataset).__name__} and a "
                    f"{type(sampler).__name__}. Use DataLoader(dataset, batch_size, shuffle=True), or train without "
                    "--ft."
                )
            self._epoch = _Epoch(key, source, self._plan(source.length))
        return self._epoch

    def _plan(self, length: int) -> ShardPlan:
        size = self._sharded.batch_size if isinstance(self._sharded, BatchSamplerShard) else None
        assert size is not None
        shards = self._dealer.num_shards
        if self._split_batches:
            size = per_process_batch_size(size, shards)
        return ShardPlan(length, size, shards, self._drop_last, self._even_batches)

    def __len__(self) -> int:
        if not self._dealer.is_training or not isinstance(self._sharded, BatchSamplerShard):
            return super().__len__()
        return self._plan(len(self._sharded.sampler)).steps(0)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full step, over all shards."""
        size = self.batch_size or 1
        return size if self._split_batches else size * self._dealer.num_shards

    # The committed position

    def commit(self) -> None:
        """Count the step in progress as done."""
        if self._at is not None and self._epoch is not None:
            epoch, step = self._at
            self._at = epoch, min(step + self._dealer.window, self._epoch.steps)

    @property
    def position(self) -> tuple[int, int] | None:
        """The epoch, and the number of its steps that are committed; None before the first training step."""
        return self._at

    def move_to(self, position: tuple[int, int] | None) -> None:
        """Continue at a position of another replica."""
        self._at = position
        if position is not None and not self.is_iterating:
            self._clock.pending = None
            self._clock.set_epoch(position[0])

    def state_dict(self) -> dict[str, Any]:
        """The committed position, in the format of all prepared loaders."""
        if self._at is None:
            return super().state_dict()
        epoch, step = self._at
        finished = self._epoch is not None and step >= self._epoch.steps
        if finished and not self.is_iterating:
            epoch, step, finished = epoch + 1, 0, False
        plan = self._plan(0)
        length = 0 if self._epoch is None else self._epoch.plan.length
        position = min(step * plan.step_size, length) if length else step * plan.step_size
        point = ResumePoint(epoch, self._unit, position, self._dealer.num_shards, self.num_workers, finished=finished)
        return point.to_state()

    def load_state_dict(self, state_dict: dict[str, Any], pass_over_finished: bool = False) -> None:
        """Continue where the state was saved, with any strategy that keeps the order (use_seedable_sampler)."""
        super().load_state_dict(state_dict, pass_over_finished)
        point = self._clock.pending
        assert point is not None
        if point.finished:
            self._at = (point.epoch + 1, 0) if pass_over_finished else (point.epoch, self._steps_in(point))
        else:
            self._at = (point.epoch, self._step_of(point))

    def _point_of(self, state_dict: dict[str, Any]) -> ResumePoint:
        point = super()._point_of(state_dict)
        if point.order:
            raise ConfigurationError(
                f"the state is from a loader whose order was drawn from a generator, in the middle of epoch "
                f"{point.epoch}, and replicas need an order that depends on a seed and the epoch. Save it with "
                "DataLoaderConfiguration(use_seedable_sampler=True), or at the end of an epoch."
            )
        if not point.finished:
            self._step_of(point)
        return point

    def _steps_in(self, point: ResumePoint) -> int:
        assert isinstance(self._sharded, BatchSamplerShard)
        return self._plan(len(self._sharded.sampler)).steps(0)

    def _step_of(self, point: ResumePoint) -> int:
        size = self._plan(0).step_size
        if point.position % size:
            raise ConfigurationError(
                f"the state was saved after {point.position} samples of epoch {point.epoch}, which is not a multiple "
                f"of the {size} samples of a global step here. Use the batch size and the number of replicas of the "
                "run that saved it, or save at the end of an epoch."
            )
        return point.position // size


@dataclass(frozen=True)
class _Units:
    """The batch sampler of a replica: the seed and the samples of each batch that it computes, from a step on."""

    order: _Epoch
    first: int
    shards: tuple[int, ...]
    window: int
    seed: int

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        total, epoch = self.order.steps, self.order.key[0]
        for begin in range(self.first, total, self.window):
            for shard in self.shards:
                for step in range(begin, min(begin + self.window, total)):
                    yield unit_seed(self.seed, epoch, step, shard), self.order.indices(step, shard)

    def __len__(self) -> int:
        return (self.order.steps - self.first) * len(self.shards)


def deal_steps(loader: Any, dealer: Dealer, split_batches: bool = False, even_batches: bool = True) -> DealtLoader:
    """A loader with the same data whose training steps are dealt.

    Args:
        loader: a loader prepared for one process.
        dealer: the strategy that deals.
        split_batches: the loader's batch size is that of a whole step; otherwise that of a shard.
        even_batches: complete the last step of an epoch with samples from its start.

    Raises:
        ConfigurationError: its steps cannot be dealt.
    """
    if type(loader) is not DataLoaderShard:
        raise ConfigurationError(
            f"a {type(loader).__name__} cannot be dealt to replicas. Leave out dispatch_batches and "
            "use_stateful_dataloader."
        )
    if not (even_batches or getattr(loader, "_drop_last", False)):
        raise ConfigurationError(
            "even_batches=False leaves shards of the last step without samples, and each shard has the same weight. "
            "Use even_batches=True, or DataLoader(..., drop_last=True)."
        )
    dealt = DealtLoader.__new__(DealtLoader)
    settings = {"_dealer": dealer, "_split_batches": split_batches, "_even_batches": even_batches}
    dealt.__dict__.update(loader.__dict__, **settings, _at=None, _epoch=None, _reader=None)
    return dealt
