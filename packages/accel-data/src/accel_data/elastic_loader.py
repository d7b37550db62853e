"""Elastic loaders: sharded by each rank, or read by rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accel_state.errors import ConfigurationError
from accel_state.state import PartialState

from ._torch_compat import stop_workers
from .adapter import T_co, loader_settings
from .batch_scatter import GlobalStep, receive_step, send_error, send_step
from .batch_shard import EpochStart
from .elastic import (
    FOR_LOOP_END,
    FOR_MODEL,
    ElasticPlan,
    ElasticSampler,
    LogicalShard,
    ShardBatch,
    ShardCollate,
    ShardedItems,
    ShardedStream,
    derived_seed,
    seed_generators,
)
from .layout import LoaderLayout, has_part_per_rank
from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration, ResumePoint
from .samplers import SeedableRandomSampler, innermost_sampler


class ShardListener(Protocol):
    """What the Accelerator does for the shards of a loader."""

    def begin(self, loader: ElasticLoader, shard: LogicalShard, again: bool) -> None:
        """Run before the batch of a shard is handed out; ``again`` after a loop inside the loop has ended."""
        ...

    def end(self) -> None:
        """Run when the loop has ended or was left, unless it is inside another one."""
        ...


class ElasticLoader(PreparedLoader[T_co]):
    """A loader whose steps have the same samples, in the same order, on any number of processes.

    Its batches are micro batches: the logical shards of each global batch that this rank computes. Before a batch is
    handed out, the global generators are seeded for its shard. ``DataLoaderConfiguration(elastic=True)`` makes one.

    A state that is saved within a step resumes at the start of that step, because what the other ranks have computed of
    it is in no state.

    Attributes:
        plan: how steps are divided.
        logical_shard: the logical shard of the latest batch; None before the first.
    """

    can_begin_at_start = False

    def __init__(self, dataset: Any, plan: ElasticPlan, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.plan: ElasticPlan = plan
        self.logical_shard: LogicalShard | None = None
        self.listener: ShardListener | None = None
        self.layout: LoaderLayout = LoaderLayout(plan.num_processes, plan.process_index)
        self._stream_state: Any = None

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The data set of the loader that was prepared."""
        return self.base_dataloader.dataset.dataset  # type: ignore[attr-defined]

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """True if batch sizes may differ between ranks in one step; the same on all ranks."""
        plan, size = self.plan, self.plan.batch_size
        if size is None or not isinstance(self._sharded, ElasticSampler):
            return True
        if plan.num_processes > 1 and (size % plan.logical_shards or plan.logical_shards % plan.num_processes):
            return True
        return not plan.drop_last and len(self._sharded.sampler) % size != 0

    @property
    def has_even_steps(self) -> bool:
        """True: every rank has the same number of micro batches."""
        return True

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples of a micro batch; the largest one, if they differ. None if batches have no fixed size."""
        size = self.plan.batch_size
        return None if size is None else -(-size // min(size, self.plan.logical_shards))

    @property
    def total_batch_size(self) -> int:
        """Samples of a step, over all ranks.

        Raises:
            ConfigurationError: batches have no fixed size.
        """
        if self.plan.batch_size is None:
            raise ConfigurationError("total_batch_size is not defined: this loader's batches have no fixed size")
        return self.plan.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set; raises TypeError if it has no length."""
        return len(self.dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch, on any number of processes; ``len`` counts micro batches of this rank.

        Raises:
            TypeError: the data set has no length.
        """
        if isinstance(self._sharded, ElasticSampler):
            return self._sharded.global_steps()
        return self.plan.steps(len(self.dataset))

    def set_sampler(self, sampler: Any) -> None:
        """Use the order of another sampler, which is seeded for each epoch, from the next iteration on.

        Raises:
            ConfigurationError: the data set is iterable, or the batch sampler wraps no sampler.
        """
        if not isinstance(self._sharded, ElasticSampler) or self._sharded.sampler is None:
            super().set_sampler(sampler)
            return
        self._sharded.batch_sampler.sampler = sampler

    def _forward_epoch(self, epoch: int) -> None:
        if isinstance(self._sharded, ElasticSampler):
            self._sharded.set_epoch(epoch)
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
                self._renew_workers()
        else:
            self.base_dataloader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            self._renew_workers()

    def _renew_workers(self) -> None:
        """Stop persistent workers, which have a copy of the data set from when they started."""
        if self.num_workers > 0 and self.persistent_workers:
            stop_workers(self.base_dataloader)

    # Saving and loading the position

    @property
    def _unit(self) -> str:
        return f"elastic {'samples' if self._sharded is None else self._sharded.unit}"

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the step to continue with: numbers, strings, and the state of an iterable data set.

        It is the same on every rank, and for any number of processes and workers.
        """
        clock = self._clock
        if clock.pending is not None:
            return clock.pending.to_state()
        current = clock.current
        point = ResumePoint(clock.epoch, self._unit, order={"seed": self.plan.seed})
        point.num_processes, point.num_workers = self.plan.num_processes, self.base_dataloader.num_workers
        if current is not None and current.open:
            point.position, point.finished = current.position, current.finished
            if self._stream_state is not None:
                point.order["stream"] = self._stream_state
        return point.to_state()

    def resume_at(self, point: ResumePoint, pass_over_finished: bool = False) -> None:
        """See the base class; the seed is that of the state."""
        self._use_seed(int(point.order["seed"]))
        super().resume_at(point, pass_over_finished)

    def resume_point(self, state_dict: dict[str, Any]) -> ResumePoint:
        point = ResumePoint.from_state(state_dict)
        if point.unit != self._unit:
            raise ConfigurationError(
                f"the state counts {point.unit}, and this loader counts {self._unit}. A state of an elastic "
                "loader continues in one of the same kind of data (map-style, iterable, batch sampler) only: set "
                "DataLoaderConfiguration(elastic=...) as it was when the state was saved."
            )
        if not isinstance(point.order.get("seed"), int):
            raise ConfigurationError(f"the state has the seed {point.order.get('seed')!r}, which must be an integer.")
        return point

    def _use_seed(self, seed: int) -> None:
        self.plan = replace(self.plan, seed=seed)
        if isinstance(self._sharded, ElasticSampler):
            self._sharded.plan = replace(self._sharded.plan, seed=seed)
            sampler = innermost_sampler(self._sharded)
            if isinstance(sampler, SeedableRandomSampler):
                sampler.initial_seed = seed
        else:
            stream: ShardedStream = self.base_dataloader.dataset  # type: ignore[assignment]
            stream.plan = replace(stream.plan, seed=seed)
        stop_workers(self.base_dataloader)

    # Iterating

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        for sent, last in self._read(iteration, skip):
            self._hand_out(iteration, sent)
            yield sent.batch, last, sent.shard.real_samples, -1
        # Code after the loop draws the same numbers on any number of processes, too.
        seed_generators(derived_seed(self.plan.seed, iteration.epoch, 0, 0, FOR_LOOP_END), self.device)

    def _hand_out(self, iteration: Iteration, sent: ShardBatch) -> None:
        shard = self.logical_shard = sent.shard
        iteration.position = shard.after if shard.ends_step else shard.position
        if shard.ends_step:
            self._stream_state = sent.state
        self._announce(again=False)

    def _announce(self, again: bool) -> None:
        """Prepare the process for the computation of the latest shard."""
        shard = self.logical_shard
        assert shard is not None
        seed_generators(shard.seed_for(FOR_MODEL), self.device)
        if self.listener is not None:
            self.listener.begin(self, shard, again)

    def end(self) -> None:
        """Unregister the loader; a loop around this one continues with the shard that it was computing."""
        super().end()
        outer = self.gradient_state.active_dataloader
        if isinstance(outer, ElasticLoader) and outer.logical_shard is not None:
            outer._announce(again=True)
        elif self.listener is not None:
            self.listener.end()

    def _read(self, iteration: Iteration, skip: int) -> Iterator[tuple[ShardBatch, bool]]:
        for sent in self._open_at(iteration, skip):
            yield sent, sent.shard.last

    def _open_at(self, iteration: Iteration, skip: int) -> Iterator[ShardBatch]:
        """Begin the torch loader's iteration at the position to resume from."""
        resume = iteration.resume
        position = self._skipped(skip) if skip else 0 if resume is None else resume.position
        self._stream_state = None if skip or resume is None else resume.order.get("stream")
        iteration.position = position
        return self._batches_from(position)

    def _batches_from(self, position: int) -> Iterator[ShardBatch]:
        if position:
            self._renew_workers()
        if isinstance(self._sharded, ElasticSampler):
            self._sharded.begin_at(EpochStart(position))
        else:
            self.base_dataloader.dataset.begin_at(position, self._stream_state)  # type: ignore[attr-defined]
        batches: Iterator[ShardBatch] = iter(self.base_dataloader)
        return batches

    def _skipped(self, micro_batches: int) -> int:
        """Return the position after a number of micro batches of this rank."""
        size = self.plan.batch_size
        slots = 1 if size is None else self.plan.slots(size)
        if micro_batches % slots:
            below = micro_batches // slots * slots
            raise ConfigurationError(
                f"skip_first_batches cannot skip {micro_batches} batches of an elastic loader: each step has {slots} "
                f"of them on {self.plan.num_processes} processes, and only whole steps can be skipped. Skip {below} or "
                f"{below + slots}."
            )
        if size is None:
            raise ConfigurationError(
                "skip_first_batches cannot skip batches of an elastic loader whose batch sampler makes batches of any "
                "size. Load the loader's state instead (load_state_dict)."
            )
        return micro_batches // slots * size

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "listener": None}


@dataclass
class ElasticStep(GlobalStep):
    """The micro batches of all ranks."""

    shards: list[LogicalShard] = field(default_factory=list)
    state: Any = None


class ElasticDispatcher(ElasticLoader[T_co]):
    """An elastic loader of which rank 0 reads all shards, and sends every rank its own."""

    def __len__(self) -> int:
        if isinstance(self._sharded, ElasticSampler):
            total = ElasticSampler(self._sharded.batch_sampler, self.plan).length_from(0)
        else:
            total = self.plan.micro_batches(len(self.dataset))
        return max(0, total - self.skip_batches)

    def _read(self, iteration: Iteration, skip: int) -> Iterator[tuple[ShardBatch, bool]]:
        collectives, rank = PartialState().collectives, self.layout.process_index
        steps = self._grouped(iteration, skip) if PartialState().process_index == 0 else self._receive()
        while True:
            try:
                step = next(steps, None)
            except Exception as error:
                if PartialState().process_index == 0:
                    send_error(collectives, error)
                raise
            if PartialState().process_index == 0 and collectives.world_size > 1:
                send_step(collectives, step, self._has_part_per_rank)
            if step is None:
                return
            yield ShardBatch(step.shards[rank], step.parts[rank], step.state), step.last

    @property
    def _has_part_per_rank(self) -> bool:
        return has_part_per_rank(self.plan.num_processes, self.torch_device_mesh)

    def _receive(self) -> Iterator[ElasticStep]:
        collectives = PartialState().collectives
        while True:
            step = receive_step(collectives, self.device, self._has_part_per_rank)
            if not isinstance(step, ElasticStep):
                return
            yield step

    def _grouped(self, iteration: Iteration, skip: int) -> Iterator[ElasticStep]:
        """Yield the micro batches of all ranks; a rank without a shard gets the first one again."""
        world = self.plan.num_processes
        batches = self._open_at(iteration, skip)
        for first in batches:
            missing = first.shard.count - first.shard.index
            group = [first, *islice(batches, min(world, missing) - 1)]
            padding = [
                ShardBatch(replace(first.shard, weight=0.0, real_samples=0), first.batch)
                for _ in range(world - len(group))
            ]
            slots, ends = -(-first.shard.count // world), group[-1].shard.ends_step
            shards = [
                replace(sent.shard, slot=first.shard.index // world, slots=slots, last=group[-1].shard.last)
                for sent in [*group, *padding]
            ]
            yield ElasticStep(
                [sent.batch for sent in [*group, *padding]],
                [shard.real_samples for shard in shards],
                group[-1].shard.last,
                shards=shards,
                state=group[-1].state if ends else None,
            )


def prepare_elastic(
    dataloader: DataLoader[Any],
    plan: ElasticPlan,
    dispatch: bool,
    device: torch.device | None,
    non_blocking: bool,
    mesh: Any,
) -> ElasticLoader:
    """Return an elastic loader that reads the data of ``dataloader``.

    Raises:
        ConfigurationError: the order or the batches of the loader cannot be divided independently of the processes.
    """
    _check(dataloader)
    reads = replace(plan, num_processes=1, process_index=0) if dispatch else plan
    kind = ElasticDispatcher if dispatch else ElasticLoader
    return kind(
        plan=plan,
        device=device,
        rng_types=[],
        _drop_last=dataloader.drop_last,
        _non_blocking=non_blocking,
        torch_device_mesh=mesh,
        **elastic_settings(dataloader, dataloader.batch_sampler, reads),
    )


def elastic_settings(dataloader: DataLoader[Any], batch_sampler: Any, plan: ElasticPlan) -> dict[str, Any]:
    """Arguments for a torch loader that reads this rank's logical shards.

    Raises:
        ConfigurationError: its workers may return batches in another order.
    """
    if dataloader.num_workers and not getattr(dataloader, "in_order", True):
        raise ConfigurationError(
            "elastic=True and --ft need batches in a fixed order, but this loader has in_order=False, so that its "
            "workers overtake each other. Remove it."
        )
    settings = {**loader_settings(dataloader), "collate_fn": ShardCollate(dataloader.collate_fn)}
    settings.pop("snapshot_every_n_steps", None)
    if isinstance(dataloader.dataset, IterableDataset):
        return {**settings, "dataset": ShardedStream(dataloader.dataset, plan), "batch_size": None}
    return {
        **settings,
        "dataset": ShardedItems(dataloader.dataset, plan.seeds_samples),
        "batch_sampler": ElasticSampler(batch_sampler, plan),
    }


def _check(dataloader: DataLoader[Any]) -> None:
    iterable = isinstance(dataloader.dataset, IterableDataset)
    batch_sampler: Any = dataloader.batch_sampler
    if dataloader.batch_size is None and (iterable or batch_sampler is None):
        raise ConfigurationError(
            "elastic=True divides global batches among the processes, but this loader has batch_size=None: its data "
            "set makes batches of its own. Give the loader a batch_size."
        )
    if iterable:
        return
    sampler = innermost_sampler(batch_sampler)
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "elastic=True divides the samples among any number of processes, but this loader has a DistributedSampler "
            f"for {sampler.num_replicas}. Remove the sampler: preparing the loader shards it."
        )
    if not isinstance(batch_sampler, Sized) or not isinstance(sampler, Sized):
        raise ConfigurationError(
            f"elastic=True draws the order of an epoch at its start, but {type(sampler).__name__} has no length. Give "
            "it __len__, or use an iterable data set."
        )
