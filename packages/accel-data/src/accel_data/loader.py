"""What all prepared loaders share: epochs, the end of the data, resuming, and moving batches to the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from accel_state.enums import RNGType
from accel_state.errors import ConfigurationError
from accel_state.random import synchronize_rng_states
from accel_state.state import GradientState, PartialState

from . import loop_hooks
from .adapter import DataLoaderAdapter
from .batch_shard import BatchSamplerShard, EpochStart, ItemShard, ShardedStream, sharded_stream, stream_arguments
from .epoch_rng import GlobalRandomState, broadcast_generator, preserved_random_state
from .iterable_loading import IterableLoading
from .iterable_shard import IterableDatasetShard, wants_epoch
from .layout import LoaderLayout
from .lookahead import ReadAheadWatch, Step, announced_steps, synchronized_steps
from .resume_state import EpochClock, Iteration, ResumePoint, steps_of_torchdata
from .samplers import get_sampler
from .state_mixin import DataLoaderStateMixin
from .to_device import placement
from .worker_rng import WorkerStates

Loader = TypeVar("Loader", bound="PreparedLoader")


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin, IterableLoading):
    """Base of the prepared loaders.

    Args:
        dataset: data set to load.
        device: where batches are moved; None leaves them where they are.
        rng_types: generators that are made equal to rank 0's at the start of an iteration; None means that of the
            sampler.
        synchronized_generator: a generator besides that of the sampler to make equal.
        skip_batches: batches to leave out in the first iteration.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        non_blocking: move batches without waiting for the copy.
        iteration: epoch of the first iteration.
        **kwargs: arguments of the torch loader.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        non_blocking: bool = False,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        if not isinstance(dataset, IterableDataset) and sharded_stream(self.base_dataloader) is None:
            replacement = stream_arguments(self.base_dataloader)
            shared = {
                name: value
                for name, value in kwargs.items()
                if name not in ("batch_size", "shuffle", "sampler", "drop_last")
            }
            super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **{**shared, **replacement})
        self.device = device
        self.rng_types = ["generator"] if rng_types is None else [str(kind) for kind in rng_types]
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.layout = LoaderLayout()
        self.gradient_state = GradientState()
        self._non_blocking = non_blocking
        self._clock = EpochClock(iteration)
        self._workers: WorkerStates | None = None
        self._stream = sharded_stream(self.base_dataloader)
        if self._stream is not None:
            self._stream.order.synchronize = "generator" in self.rng_types

    # Epochs

    @property
    def iteration(self) -> int:
        """Epoch of the iteration in progress, or of the next one."""
        return self._clock.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._clock.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Epochs count up by themselves otherwise, one an iteration."""
        self._clock.set_epoch(epoch)
        if self._clock.current is None or not self._clock.current.open:
            self._pass_on_epoch(epoch)

    def _pass_on_epoch(self, epoch: int) -> None:
        sampler: Any = self._stream
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if wants_epoch(self.dataset):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            if self.num_workers > 0 and self.persistent_workers:
                # Workers that live on have a copy of the data set from when they were started, and would never see the
                # epoch.
                self.base_dataloader._iterator = None

    @property
    def is_iterating(self) -> bool:
        """Whether an iteration has begun, and neither ended nor been abandoned."""
        return self._clock.current is not None and self._clock.current.open

    def abandon(self) -> None:
        """Let the iteration in progress count as ended: a state that is saved now begins with the next epoch."""
        if self._clock.current is not None:
            self._clock.current.close()

    def get_sampler(self) -> Any:
        """The sampler that decides on the order of the samples; None for an iterable data set."""
        return get_sampler(self.base_dataloader)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The same as :meth:`get_sampler`."""
        return self.get_sampler()

    def set_sampler(self, sampler: Any) -> None:
        """Take the samples in the order of another sampler from the next iteration on.

        Raises:
            ConfigurationError: the batches are not made of the samples of one sampler.
        """
        stream = self._stream
        if isinstance(stream, ItemShard):
            stream.sampler = sampler
        elif isinstance(stream, BatchSamplerShard) and hasattr(stream.batch_sampler, "sampler"):
            stream.batch_sampler.sampler = sampler
        else:
            raise ConfigurationError(
                f"the sampler of this loader cannot be replaced: its data set is a {type(self.dataset).__name__} and "
                "its batches come from "
                f"{type(getattr(stream, 'batch_sampler', stream)).__name__}. Build another loader."
            )
        assert stream is not None
        stream.use_order_of(sampler)

    # Sizes

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """Whether batch sizes may differ between ranks in one step; the same on all ranks."""
        return self.layout.ragged or (self._stream is not None and self._stream.ragged)

    @property
    def has_even_steps(self) -> bool:
        """Whether all ranks are sure to have the same number of steps in an epoch."""
        if self.layout.num_processes == 1 or self.layout.synchronize_steps:
            return True
        if self._stream is not None:
            return self._stream.has_even_steps
        return isinstance(self.dataset, IterableDatasetShard) and (self.dataset.even_batches or self.dataset.drop_last)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples in a full batch of this rank; None where batches have no fixed size."""
        if isinstance(self._stream, BatchSamplerShard):
            return self._stream.local_batch_size
        return self.base_dataloader.batch_size

    @property
    def total_batch_size(self) -> int:
        """Samples in a full step, over all ranks.

        Raises:
            ConfigurationError: batches have no fixed size.
        """
        size = self.batch_size
        if size is None:
            raise ConfigurationError("total_batch_size is not known: this loader's batches have no fixed size")
        return size * self.layout.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set; TypeError if it does not know its length."""
        dataset: Any = self.dataset
        whole: Any = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        return len(whole)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)

    # Resuming

    def _unit(self) -> str:
        if self._stream is not None:
            return self._stream.unit
        return "samples" if self._counts_samples() else "steps"

    def _counts_samples(self) -> bool:
        """Whether the position in an iterable data set is known in samples: one stream, which is read in this process
        from its start.
        """
        return not (self.layout.synchronize_steps or self.num_workers > 0 or self.use_stateful_dataloader)

    def _units_a_batch(self) -> int:
        """Units of the stream that a batch of the torch loader stands for, with an iterable data set that ``_readers``
        ranks read.
        """
        return (self.base_dataloader.batch_size or 1) * self._readers() if self._counts_samples() else 1

    def _readers(self) -> int:
        """Number of ranks that the stream is divided among before it is batched."""
        return self.layout.num_processes

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the batches handed out: numbers, strings, tuples and tensors, the same on
        every rank.

        A loader that is not being iterated is at the start of its next epoch, also if its latest iteration was
        abandoned.
        """
        clock = self._clock
        if clock.pending is not None:
            return clock.pending.to_state()
        point = ResumePoint(
            clock.epoch, self._unit(), num_processes=self.layout.num_processes, num_workers=self.num_workers
        )
        current = clock.current
        if current is None or not current.open:
            self._describe_next(point)
        else:
            self._describe(point, current)
        return point.to_state()

    def _describe(self, point: ResumePoint, current: Iteration) -> None:
        """Fill in the middle of an iteration."""
        point.position = self._position(current)
        point.order = {} if current.progress is None else current.progress.origin or {}
        point.begin = current.begin
        if current.watch is not None:
            point.read_ahead = current.watch.read_ahead()
            point.source = current.watch.source()
        if current.workers is not None:
            # An iterable is read again from the start of the epoch, with the random numbers of its workers.
            at_start = self._stream is None
            point.workers = (
                current.workers.to_plain_at_start()
                if at_start
                else current.workers.to_plain(self._batches_out(current))
            )

    def _position(self, current: Iteration) -> int:
        """Units of the stream that all ranks together have handed out."""
        if current.progress is not None:
            return current.progress.position_after(current.steps) * self.layout.position_scale
        return current.position + current.steps * self._units_a_batch()

    def _batches_out(self, current: Iteration) -> int:
        """Batches of the torch loader that were handed out in an iteration."""
        return current.steps * self._batches_a_step

    @property
    def _reads_ahead(self) -> bool:
        """Whether map-style data is read ahead of the loop in this process."""
        return self.layout.synchronize_steps and self.num_workers == 0

    def _describe_next(self, point: ResumePoint) -> None:
        """Fill in the start of the next epoch, as far as it depends on generators of this loader's own."""
        generator = self.base_dataloader.generator
        order_generator = None if self._stream is None else self._stream.order.generator
        if isinstance(generator, torch.Generator):
            point.begin = {"generator": generator.get_state()}
        # Where one generator serves both, torch draws the seed of the workers from it first; persistent workers have
        # theirs already.
        if order_generator is not None and (order_generator is not generator or self._keeps_workers()):
            point.order = {"generator": order_generator.get_state()}
        if self._keeps_workers() and self._workers is not None:
            point.workers = self._workers.for_next_epoch().to_plain(0)

    def _keeps_workers(self) -> bool:
        kept = self.num_workers > 0 and self.persistent_workers and not wants_epoch(self.dataset)
        return kept and self.base_dataloader._iterator is not None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the next iteration where the state was saved: same order, same position, then the epochs after
        it.

        On map-style data nothing that was handed out is read again. The number of ranks may be another one, where the
        state says so.

        Raises:
            ConfigurationError: this is no state of a loader of this kind (or of torchdata, for a loader whose order is
                fixed), or its position cannot be kept on this number of ranks.
        """
        steps = steps_of_torchdata(state_dict)
        point = ResumePoint.from_state(state_dict) if steps is None else self._point_after(steps)
        point.check_fits(self._unit())
        if (
            point.position
            and point.num_processes != self.layout.num_processes
            and (point.unit == "steps" or not self.layout.elastic)
        ):
            raise ConfigurationError(
                f"the state is from {point.num_processes} processes in the middle of an epoch, and cannot be "
                "continued on "
                f"{self.layout.num_processes}: each rank of this loader reads data of its own, in steps. Continue on "
                f"{point.num_processes} "
                "processes, or save at the end of an epoch."
            )
        if point.position and point.unit == "steps" and point.num_workers != self.num_workers:
            raise ConfigurationError(
                f"the state is from a loader with num_workers={point.num_workers} in the middle of an epoch, and this "
                "one has num_workers="
                f"{self.num_workers}: the workers of an iterable data set decide on the order of its batches. Use the "
                "same number."
            )
        if point.num_processes != self.layout.num_processes or point.num_workers != self.num_workers:
            point = self._without_generators_of_ranks(point)
        self._clock.load(point)

    def _point_after(self, steps: int) -> ResumePoint:
        """After so many steps of the epoch that comes next, whose order has to follow from its number alone."""
        if self._stream is None or not self._stream.order.is_deterministic:
            raise ConfigurationError(
                f"the state is one of torchdata, after {steps} batches, and says nothing of how the "
                f"{type(self.sampler).__name__} shuffled. It can be continued with a sampler whose order is fixed: a "
                "sequential one, or "
                "use_seedable_sampler=True. Otherwise load the rest of the state, and use skip_first_batches."
            )
        position = steps * self._stream.step_size * self.layout.position_scale * self._batches_a_step
        return ResumePoint(self._clock.epoch, self._unit(), position, self.layout.num_processes, self.num_workers)

    @property
    def _batches_a_step(self) -> int:
        """Batches of the torch loader that make a step."""
        return 1

    def _without_generators_of_ranks(self, point: ResumePoint) -> ResumePoint:
        """A state of other processes: those that read here draw random numbers of their own, in the same order of the
        samples.
        """
        begin = {} if self._stream is not None and "torch" in point.begin else point.begin
        return replace(point, begin=begin, read_ahead={}, workers={})

    def skipping(self: Loader, num_batches: int) -> Loader:
        """This loader without the first ``num_batches`` of its next epoch; the same in everything else, epochs
        included.
        """
        skipped = copy.copy(self)
        skipped.skip_batches = num_batches
        return skipped

    # Iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        watch = loop_hooks.current()
        if watch is not None:
            watch.begin(self)
            if not self.has_even_steps:
                watch = None
        iteration = self._clock.begin()
        skip, self_state = self.skip_batches, self.__dict__
        self.begin()
        try:
            self._pass_on_epoch(iteration.epoch)
            place, activate = placement(self.device, self._non_blocking), self.gradient_state._activate
            # Attributes are set through __dict__: torch's loaders check every assignment, which costs more than the
            # rest of this loop.
            for batch, last, real, remainder in self._steps(iteration, skip):
                iteration.steps += 1
                self_state["end_of_dataloader"] = last
                self_state["real_samples"] = real
                self_state["remainder"] = remainder
                activate(self)
                yield place(batch)
                if watch is not None:
                    watch.step(self)
        finally:
            iteration.close()
            if skip:
                self.skip_batches = 0
            if self._clock.current is iteration:
                self.end()

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        raise NotImplementedError

    def _synchronize_generators(self) -> None:
        others = [kind for kind in self.rng_types if kind != "generator"]
        if others and PartialState().collectives.world_size > 1:
            synchronize_rng_states(others)
        if self.synchronized_generator is not None and "generator" in self.rng_types:
            broadcast_generator(self.synchronized_generator)

    def _local_steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        """The steps of the torch loader in this process."""
        if self._stream is not None:
            return self._map_steps(self._stream, iteration, skip)
        return self._iterable_steps(iteration, skip)

    def _map_steps(self, stream: ShardedStream, iteration: Iteration, skip: int) -> Iterator[Step]:
        resume = iteration.resume or ResumePoint(iteration.epoch, stream.unit)
        position = skip * stream.step_size if skip else resume.position // self.layout.position_scale
        stream.begin_at(EpochStart(position, resume.order))
        if self._reads_ahead:
            iteration.watch = ReadAheadWatch(partial(self._batches_out, iteration))
        with preserved_random_state() if resume.position else nullcontext():
            batches = self._open(iteration)
            if iteration.watch is not None and not skip:
                iteration.watch.read_again(batches, resume.read_ahead)
        iteration.progress = stream.progress
        steps = announced_steps(
            batches if iteration.watch is None else iteration.watch.through(batches), stream.progress
        )
        if self.layout.padding_at_end:
            steps = self.layout.with_padding_at_end(steps)
        return self._synchronized(steps)

    def _open(self, iteration: Iteration, *, torch_only: bool = True) -> Iterator[Any]:
        """Begin the torch loader's iteration, which draws the seed of its workers, as the epoch once did if it is
        resumed.
        """
        generator = self.base_dataloader.generator
        resume = iteration.resume
        if isinstance(generator, torch.Generator):
            if resume is not None and "generator" in resume.begin:
                generator.set_state(resume.begin["generator"])
            iteration.begin = {"generator": generator.get_state()}
        elif resume is not None and "torch" in resume.begin:
            GlobalRandomState.from_plain(resume.begin).restore()
            iteration.begin = resume.begin
        else:
            iteration.begin = GlobalRandomState.capture(torch_only=torch_only).to_plain()
        return self._open_workers(iteration) if self.num_workers > 0 else iter(self.base_dataloader)

    def _open_workers(self, iteration: Iteration) -> Iterator[Any]:
        resume = iteration.resume
        if resume is not None:
            # Workers that still live are somewhere else.
            self.base_dataloader._iterator = None
            workers = WorkerStates.from_plain(resume.workers) if resume.workers else WorkerStates()
        elif self._workers is not None and self._keeps_workers():
            workers = self._workers.for_next_epoch()
        else:
            workers = WorkerStates()
        iteration.workers = self._workers = workers
        track = self._stream is not None or self.persistent_workers
        return workers.open(self.base_dataloader, partial(self._batches_out, iteration), track=track)

    def _synchronized(self, steps: Iterator[Step], latest: Any = None) -> Iterator[Step]:
        return synchronized_steps(steps, PartialState().collectives, latest) if self.layout.synchronize_steps else steps
