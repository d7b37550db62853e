"""Elastic loaders for replicas that may be killed: the set of ranks may change from one step to the next.

A step has the same samples and random numbers whichever replicas compute it. It is handed out again until it has been
committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from accel_state.errors import ConfigurationError

from .adapter import T_co
from .batch_shard import BatchSamplerShard
from .elastic import ElasticPlan, ElasticSampler, ShardBatch
from .elastic_loader import ElasticLoader, elastic_settings
from .lookahead import Step
from .resume_state import Iteration, ResumePoint
from .samplers import is_random_access
from .shard import DataLoaderShard
from .shard_math import per_process_batch_size


class Membership(Protocol):
    """What a :class:`ReplicaLoader` asks the strategy that keeps track of the replicas."""

    num_shards: int
    """Logical shards of a global batch: the processes of all replicas when none is missing."""
    seed: int
    """Seed of the random numbers drawn in a step; the same on all replicas."""

    @property
    def is_training(self) -> bool:
        """True if an iteration that begins now trains; otherwise each replica reads all data."""

    @property
    def window(self) -> int:
        """Global batches of a step (gradient accumulation)."""

    def open_step(self, loader: Any) -> tuple[int, int]:
        """Wait for the replicas of the next step. It may load the state of another replica, loaders included.

        Returns:
            The rank of this process among those of all live replicas, and their number. A replica whose rank is not
            below ``num_shards`` stands by.
        """

    def end_step(self, loader: Any) -> None:
        """Run after the last batch of a step; raises if the script has not applied the step."""


class ReplicaLoader(ElasticLoader[T_co]):
    """A loader whose training steps are divided among the live replicas; :func:`share_among_replicas` makes one.

    Its states are those of an ordinary loader on as many processes as there are logical shards.

    Attributes:
        whole: the loader of an iteration that does not train.
    """

    whole: DataLoaderShard
    members: Membership
    _committed: tuple[int, int] | None  # epoch, and its samples in committed steps; None before the first training step

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self.logical_shard: None = None
        if not self.members.is_training:
            return self.whole._steps(iteration, skip)
        if skip:
            raise ConfigurationError(
                f"skip_first_batches(loader, {skip}) cannot be used with replicas, which share the steps of a loader. "
                "Continue with accelerator.resume() or load_state, which restore the position."
            )
        if self._committed is None or self._committed[0] < iteration.epoch:
            self._committed = (iteration.epoch, 0)
        return self._shared_steps(iteration)

    def _shared_steps(self, iteration: Iteration) -> Iterator[Step]:
        sampler, members = self._map_style, self.members
        batches: Iterator[ShardBatch] = iter(())
        reads: tuple[ElasticPlan, Any] | None = None  # which batches come next
        while (at := self._committed) is not None and at[0] == iteration.epoch and sampler.global_steps(at[1]):
            rank, world = members.open_step(self)
            if self._committed != at:
                continue  # this replica had fallen behind, and now has the state of another one
            plan = replace(self.plan, num_processes=world, process_index=rank, seed=members.seed, window=members.window)
            if reads != (plan, at):
                self.plan = sampler.plan = plan
                batches = self._batches_from(at[1])
            for sent in batches:
                self._hand_out(iteration, sent)
                yield sent.batch, sent.shard.last, sent.shard.real_samples, -1
                if sent.shard.ends_step:
                    reads = plan, (at[0], sent.shard.after)
                    break
            members.end_step(self)

    @property
    def _map_style(self) -> ElasticSampler:
        assert isinstance(self._sharded, ElasticSampler)
        return self._sharded

    def _forward_epoch(self, epoch: int) -> None:
        super()._forward_epoch(epoch)
        self.whole._forward_epoch(epoch)

    # Sizes

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """True if batch sizes may differ between the processes of a replica in one step."""
        return self.members.is_training or self.whole.ragged

    def __len__(self) -> int:
        if not self.members.is_training:
            return len(self.whole)
        return self.plan.steps(len(self._map_style.sampler))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch, on any number of replicas."""
        return -(-self.plan.steps(len(self._map_style.sampler)) // self.members.window)

    # The committed position

    def commit(self) -> None:
        """Count the step in progress as done."""
        if self._committed is not None and self.logical_shard is not None:
            self._committed = self._committed[0], self.logical_shard.after

    @property
    def position(self) -> tuple[int, int] | None:
        """The epoch, and the number of its samples in committed steps; None before the first training step."""
        return self._committed

    def move_to(self, position: tuple[int, int] | None) -> None:
        """Continue at a position of another replica."""
        self._committed = position
        if position is not None and not self.is_iterating:
            self._clock.pending = None
            self._clock.set_epoch(position[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position, in the format of all prepared loaders."""
        if self._committed is None:
            return self.whole.state_dict()
        epoch, position = self._committed
        finished = not self._map_style.global_steps(position)
        if finished and not self.is_iterating:
            epoch, position, finished = epoch + 1, 0, False
        shards = self.members.num_shards
        return ResumePoint(epoch, "samples", position, shards, self.num_workers, finished=finished).to_state()

    def resume_at(self, point: ResumePoint, pass_over_finished: bool = False) -> None:
        self._clock.load(point, pass_over_finished)
        self._committed = (point.epoch, point.position)
        if point.finished:
            length = len(self._map_style.sampler)
            self._committed = (point.epoch + 1, 0) if pass_over_finished else (point.epoch, length)

    def resume_point(self, state_dict: dict[str, Any]) -> ResumePoint:
        """See the base class; the state may be of any strategy that keeps the order (use_seedable_sampler)."""
        point, size = self.whole.resume_point(state_dict), self.total_batch_size
        if point.order:
            raise ConfigurationError(
                f"the state is from a loader whose order was drawn from a generator, in the middle of epoch "
                f"{point.epoch}, and replicas need an order that depends on a seed and the epoch. Save it with "
                "DataLoaderConfiguration(use_seedable_sampler=True), or at the end of an epoch."
            )
        if not point.finished and point.position % size:
            raise ConfigurationError(
                f"the state was saved after {point.position} samples of epoch {point.epoch}, which is not a multiple "
                f"of the {size} samples of a global batch here. Use the batch size and the number of replicas of the "
                "run that saved it, or save at the end of an epoch."
            )
        return point


def share_among_replicas(
    loader: Any, members: Membership, split_batches: bool = False, even_batches: bool = True
) -> Any:
    """Return a loader with the same data whose training steps are divided among the live replicas.

    Args:
        loader: a loader prepared for the processes of one replica.
        members: the strategy that keeps track of the replicas.
        split_batches: the loader's batch size is that of a global batch; otherwise that of a logical shard.
        even_batches: complete the last global batch of an epoch with samples from its start.

    Returns:
        The loader itself if its data cannot be divided so: it serves for evaluation only.

    Raises:
        ConfigurationError: logical shards of the last global batch would have no samples.
    """
    if type(loader) is not DataLoaderShard or not is_shareable(loader):
        return loader
    if not (even_batches or loader._drop_last):
        raise ConfigurationError(
            "even_batches=False leaves logical shards of the last global batch without samples, and all have the same "
            "weight. Use even_batches=True, or DataLoader(..., drop_last=True)."
        )
    sharded: Any = loader._sharded
    shards, size = members.num_shards, sharded.batch_size
    size = per_process_batch_size(size, shards) * shards if split_batches else size * shards
    plan = ElasticPlan(
        *(size, shards, shards, 0, sharded.drop_last, even_batches, members.seed), lockstep=False, seeds_samples=False
    )
    shared = ReplicaLoader(
        plan=plan,
        device=loader.device,
        rng_types=[],
        _drop_last=loader._drop_last,
        _non_blocking=loader._non_blocking,
        torch_device_mesh=loader.torch_device_mesh,
        **elastic_settings(loader.base_dataloader, sharded.batch_sampler, plan),
    )
    shared.whole, shared.members, shared._committed = loader, members, None
    shared._clock = loader._clock
    return shared


def is_shareable(loader: Any) -> bool:
    """Return True if the order of a loader is that of a SequentialSampler, or a RandomSampler without replacement."""
    sharded = getattr(loader, "_sharded", None)
    return isinstance(sharded, BatchSamplerShard) and sharded.is_plain and is_random_access(sharded.sampler)
