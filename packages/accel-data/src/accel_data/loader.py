"""Base of all prepared loaders: epochs, the end of the data, resuming, and moving batches to the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_state import devices, get_logger
from accel_state.enums import RNGType
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.humanize import counted
from accel_state.random import synchronize_rng_states
from accel_state.state import GradientState, PartialState

from . import loop_hooks
from ._torch_compat import has_live_workers, stop_workers
from .adapter import DataLoaderAdapter, DataLoaderStateMixin, T_co, loader_settings
from .batch_ops import is_view
from .batch_shard import BatchSamplerShard, EpochStart, ItemShard, ShardedSampler, sampler_arguments, sharded_sampler
from .epoch_rng import broadcast_generator
from .iterable_shard import IterableDatasetShard, wants_epoch
from .layout import LoaderLayout
from .lookahead import ReadAheadTracker, Step, lookahead_steps, map_style_steps, open_ended_steps, synchronized_steps
from .resume_state import (
    EpochClock,
    Iteration,
    ResumePoint,
    knows_position,
    sampler_generator,
    steps_of_torchdata,
    with_steps,
)
from .rng_state import capture_rng, from_plain, preserve_rng, restore_rng, to_plain
from .samplers import get_sampler, inner_sampler
from .to_device import batch_mover
from .worker_rng import WorkerRngStates

logger: Final = get_logger(__name__)

Loader = TypeVar("Loader", bound="PreparedLoader[Any]")


class PreparedLoader(DataLoaderAdapter[T_co], DataLoaderStateMixin):
    """Base of the prepared loaders; see :class:`accel_data.DataLoaderShard` for the arguments."""

    base_dataloader: DataLoader[Any]
    device: torch.device | None
    rng_types: list[str]
    synchronized_generator: torch.Generator | None
    skip_batches: int
    layout: LoaderLayout
    gradient_state: GradientState
    torch_device_mesh: Any
    _drop_last: bool
    _non_blocking: bool
    _clock: EpochClock
    _workers: WorkerRngStates | None
    _sharded: ShardedSampler | None

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        if not isinstance(dataset, IterableDataset) and sharded_sampler(self.base_dataloader) is None:
            for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
                kwargs.pop(name, None)
            kwargs.update(sampler_arguments(self.base_dataloader))
            super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        vars(self).update(  # at once: nothing here is a setting of the torch loader, which __setattr__ looks for
            device=device,
            rng_types=["generator"] if rng_types is None else list(map(str, rng_types)),
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            layout=LoaderLayout(),
            gradient_state=GradientState(),
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            _clock=EpochClock(iteration),
            _workers=None,
            _sharded=sharded_sampler(self.base_dataloader),
        )
        if self._sharded is not None:
            self._sharded.rng.synchronize = "generator" in self.rng_types
            self._sharded.rng.communicates = bool(self.rng_types)
            self.layout = LoaderLayout(self._sharded.num_processes, self._sharded.process_index)

    # Epochs

    @property
    def iteration(self) -> int:
        """Epoch of the iteration in progress, or of the next one."""
        return self._clock.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._clock.set_epoch(epoch)

    @property
    def clock(self) -> EpochClock:
        """The counter of epochs, which a loader shares with those made from it by skipping batches."""
        return self._clock

    _origin: PreparedLoader[Any] | None = None

    @property
    def origin(self) -> PreparedLoader[Any]:
        """The loader that ``skip_first_batches`` made this one from; otherwise this one."""
        return self if self._origin is None else self._origin

    def pass_over_finished_epoch(self, pass_over: bool = True) -> None:
        """Begin with the next epoch if a loaded state was saved after the last batch of an epoch.

        Args:
            pass_over: False completes the loaded epoch first, by an iteration without batches.
        """
        self._clock.pass_over(pass_over)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Otherwise each iteration advances the epoch by one."""
        self._clock.set_epoch(epoch)
        if not self.is_iterating:
            self._forward_epoch(epoch)

    def _forward_epoch(self, epoch: int) -> None:
        sampler: Any = self._sharded
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = inner_sampler(sampler)
        if wants_epoch(self.dataset):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            if self.num_workers > 0 and self.persistent_workers:
                # Persistent workers hold a copy of the data set from when they started, which has the old epoch.
                stop_workers(self.base_dataloader)

    @property
    def is_iterating(self) -> bool:
        """True if an iteration is in progress: it began, and neither ended nor was abandoned."""
        return self._clock.current is not None and self._clock.current.open

    @property
    def has_been_left(self) -> bool:
        """True if the latest iteration in this process has ended or was left early."""
        return self._clock.current is not None and not self._clock.current.open

    def abandon(self) -> None:
        """Treat the iteration in progress as ended: a state saved now begins with the next epoch."""
        if self._clock.current is not None:
            self._clock.current.close()

    def get_sampler(self) -> Any:
        """Return the sampler that determines the order of the samples; None for an iterable data set."""
        return get_sampler(self.base_dataloader)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The result of :meth:`get_sampler`; for an iterable data set torch's own, as in an unprepared loader."""
        sampler = self.get_sampler()
        return self.base_dataloader.sampler if sampler is None else sampler

    def set_sampler(self, sampler: Any) -> None:
        """Use the order of another sampler from the next iteration on.

        Raises:
            ConfigurationError: the data set is iterable, or the batch sampler wraps no sampler.
        """
        sharded = self._sharded
        if isinstance(sharded, ItemShard):
            sharded.sampler = sampler
        elif isinstance(sharded, BatchSamplerShard) and hasattr(sharded.batch_sampler, "sampler"):
            sharded.batch_sampler.sampler = sampler
        else:
            raise ConfigurationError(
                f"the sampler of this loader cannot be replaced: its data set is a {type(self.dataset).__name__} and "
                f"its batches come from {type(getattr(sharded, 'batch_sampler', sharded)).__name__}. Build a new "
                "loader."
            )
        sharded.use_rng_of(sampler)

    # Sizes

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """True if batch sizes may differ between ranks in one step; the same on all ranks."""
        return self.layout.ragged or (self._sharded is not None and self._sharded.ragged)

    @property
    def has_padding(self) -> bool:
        """True if a batch of the current step has padding on some rank, or may have another size than on the others."""
        padded = self.end_of_dataloader and (self.ragged or self.remainder > 0)
        return padded and self.layout.num_processes > 1

    @property
    def has_even_steps(self) -> bool:
        """True if all ranks certainly have the same number of steps in an epoch."""
        if self.layout.num_processes == 1 or self.layout.synchronize_steps:
            return True
        if self._sharded is not None:
            return self._sharded.has_even_steps
        return isinstance(self.dataset, IterableDatasetShard) and (self.dataset.even_batches or self.dataset.drop_last)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples in a full batch of this rank; None if batches have no fixed size."""
        if isinstance(self._sharded, BatchSamplerShard):
            return self._sharded.local_batch_size
        return self.base_dataloader.batch_size

    @property
    def padded_batch_size(self) -> int | None:
        """Samples in this rank's batch of a last step with a ``remainder``, padding included; None if not known."""
        return self.batch_size if self.layout.num_processes > 1 else self.remainder

    @property
    def total_batch_size(self) -> int:
        """Samples in a full step, over all ranks.

        Raises:
            ConfigurationError: batches have no fixed size.
        """
        size = self.batch_size
        if size is None:
            raise ConfigurationError("total_batch_size is not defined: this loader's batches have no fixed size")
        return size * self.layout.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the unsharded data set; raises TypeError if it has no length."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return len(dataset)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)

    # Saving and loading the position

    @property
    def _unit(self) -> str:
        if self._sharded is not None:
            return self._sharded.unit
        return "samples" if self._counts_samples else "steps"

    @property
    def _counts_samples(self) -> bool:
        """True if an iterable data set's position is known in samples: this process reads it from its start."""
        return not (self.layout.synchronize_steps or self.num_workers > 0 or self.use_stateful_dataloader)

    @property
    def _units_per_batch(self) -> int:
        """Units of the stream per batch of the torch loader, for iterable data."""
        return (self.base_dataloader.batch_size or 1) * self._num_readers if self._counts_samples else 1

    @property
    def _num_readers(self) -> int:
        """Number of ranks that the stream is divided among before it is batched."""
        return self.layout.num_processes

    @property
    def _batches_per_step(self) -> int:
        """Batches of the torch loader per step."""
        return 1

    def _batches_out(self, iteration: Iteration) -> int:
        """Batches of the torch loader that were handed out in an iteration."""
        return iteration.steps * self._batches_per_step

    def _position(self, iteration: Iteration) -> int:
        """Units of the stream handed out by all ranks together."""
        if iteration.progress is not None:
            return iteration.position_after(iteration.progress, iteration.steps) * self.layout.position_scale
        return iteration.position + iteration.steps * self._units_per_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the batches handed out: numbers, strings, tuples and tensors.

        It is the same on every rank, except for the states of random number generators. A loader that is not being
        iterated is at the start of its next epoch, even if its latest iteration was abandoned.

        With ``use_stateful_dataloader`` it also has the keys of torchdata's own state, once an epoch has begun in this
        process.
        """
        clock = self._clock
        if clock.pending is not None:
            return clock.pending.to_state()
        point = ResumePoint(
            clock.epoch,
            self._unit,
            num_processes=self.layout.num_processes,
            num_workers=self.base_dataloader.num_workers,
        )
        iteration = clock.current
        if iteration is None or not iteration.open:
            self._describe_next_epoch(point)
        else:
            point.finished = iteration.finished
            point.position = self._position(iteration)
            point.order = {} if iteration.progress is None else iteration.progress.origin or {}
            point.begin = iteration.begin
            if iteration.tracker is not None:
                point.read_ahead = iteration.tracker.read_ahead()
                point.source = iteration.tracker.source()
            if iteration.workers is not None and self._sharded is None:
                # Iterable data is read again from the start of the epoch, with the random numbers of its workers.
                point.workers = iteration.workers.to_plain_at_start()
            elif iteration.workers is not None:
                point.workers = iteration.workers.to_plain(self._batches_out(iteration))
        if self.use_stateful_dataloader and not point.source:
            point.source = self._state_of_torchdata(iteration)
        return point.to_state()

    def _state_of_torchdata(self, iteration: Iteration | None) -> dict[str, Any]:
        """Return the state of the StatefulDataLoader.

        Empty before it began, because torchdata would begin an epoch then.
        """
        if iteration is None or not has_live_workers(self.base_dataloader):
            return {}
        state: dict[str, Any] = self.base_dataloader.state_dict()  # type: ignore[attr-defined]
        if not iteration.open:
            return state if state.get("_iterator_finished") else {}
        if self._sharded is None:
            return state
        # A resumed epoch begins at its position, which torchdata does not count.
        scale = self._sharded.step_size * self.layout.position_scale
        return with_steps(state, -(-self._position(iteration) // scale))

    def _describe_next_epoch(self, point: ResumePoint) -> None:
        """Fill in the generators of this loader at the start of the next epoch; global generators are not its own."""
        generator = self.base_dataloader.generator
        order_generator = None if self._sharded is None else self._sharded.rng.lasting_generator
        if isinstance(generator, torch.Generator):
            point.begin = {"generator": generator.get_state()}
        # If one generator serves both, torch draws the workers' seed from it first, except for persistent workers.
        if order_generator is not None and (order_generator is not generator or self._keeps_workers()):
            point.order = {"generator": order_generator.get_state()}
        if self._keeps_workers() and self._workers is not None:
            point.workers = self._workers.for_next_epoch().to_plain(0)

    def _keeps_workers(self) -> bool:
        persistent = self.num_workers > 0 and self.persistent_workers and not wants_epoch(self.dataset)
        return persistent and has_live_workers(self.base_dataloader)

    can_begin_at_start = True
    """Whether a loaded epoch may begin with its first batch; loaders of steps that are computed by others cannot."""

    def load_state_dict(self, state_dict: dict[str, Any], pass_over_finished: bool = False) -> None:
        """Resume in the next iteration where the state was saved: same order, same position, then later epochs.

        After a state that was saved between the last batch of an epoch and the end of its loop, the next iteration has
        no batches, unless ``pass_over_finished`` is set, :meth:`pass_over_finished_epoch` is called, the next epoch is
        chosen by :meth:`set_epoch`, or the loader is passed to ``skip_first_batches(loader, 0)``.

        On map-style data, samples that were handed out are not read again. The number of ranks may change, unless the
        position depends on it.

        Raises:
            ConfigurationError: ``state_dict`` is not from a loader of this kind (or from torchdata, for a loader whose
                order is deterministic), or its position is meaningless on this number of ranks or workers.
        """
        self.resume_at(self.resume_point(state_dict), pass_over_finished)

    def resume_at(self, point: ResumePoint, pass_over_finished: bool = False) -> None:
        """Resume at what :meth:`resume_point` has returned; see :meth:`load_state_dict`."""
        self._clock.load(point, pass_over_finished)

    def rewind(self) -> None:
        """Begin a loaded epoch with its first batch, in the same order, for scripts that leave out batches themselves.

        ``skip_first_batches`` counts from there in any case. Without effect on a StatefulDataLoader.
        """
        self._clock.from_start = self.can_begin_at_start and not self.use_stateful_dataloader

    def resume_point(self, state_dict: dict[str, Any]) -> ResumePoint:
        """Return the position in a state, which this loader can continue from; see :meth:`load_state_dict`."""
        if not isinstance(state_dict, dict):
            raise ArgumentTypeError(
                f"the state of a loader is {state_dict!r}, a {type(state_dict).__name__}. Load what state_dict() of a "
                "prepared loader has returned."
            )
        steps = None if "format" in state_dict else steps_of_torchdata(state_dict)
        point = ResumePoint.from_state(state_dict) if steps is None else self._point_after(steps, state_dict)
        if point.unit != self._unit:
            raise ConfigurationError(
                f"the state counts {point.unit}, and this loader counts {self._unit}: it was saved by another kind of "
                "loader. Build the loader as it was when the state was saved (map-style or iterable data, batch "
                "sampler, batch_size=None, dispatch_batches)."
            )
        same_ranks = point.num_processes == self.layout.num_processes
        same_workers = point.num_workers == self.base_dataloader.num_workers
        if point.position and not same_ranks and (point.unit == "steps" or not self.layout.elastic):
            raise ConfigurationError(
                f"the state is from {counted(point.num_processes, 'process')} in the middle of an epoch, and cannot be "
                f"continued on {self.layout.num_processes}: each rank of this loader reads its own data, in steps. "
                f"Continue on {counted(point.num_processes, 'process')}, or save at the end of an epoch."
            )
        if point.position and not same_workers and point.unit == "steps":
            raise ConfigurationError(
                f"the state is from a loader with num_workers={point.num_workers} in the middle of an epoch, and this "
                f"one has num_workers={self.num_workers}: the workers of an iterable data set determine the order of "
                f"its batches. Use num_workers={point.num_workers}."
            )
        if not (same_ranks and same_workers):
            # These processes draw other random numbers, for samples in the same order.
            begin = {} if self._sharded is not None and "torch" in point.begin else point.begin
            point = replace(point, begin=begin, read_ahead={}, workers={}, source={})
        return point

    def _point_after(self, steps: int, state: dict[str, Any]) -> ResumePoint:
        """Return the position after that many steps of the next epoch, for a state of torchdata."""
        point = ResumePoint(self._clock.epoch, self._unit, 0, self.layout.num_processes, self.num_workers)
        if self._sharded is None:
            return replace(point, position=steps * self._units_per_batch, source=state)
        generator = sampler_generator(state)
        if generator is not None and self._sharded.rng.owner is not None and not state.get("_iterator_finished"):
            point.order = {"generator": generator}
        elif steps and not self._sharded.rng.is_deterministic:
            raise ConfigurationError(
                f"the state is from torchdata, after {steps} batches, and does not include how the "
                f"{type(self.sampler).__name__} shuffled. It can be loaded with a deterministic order: a sequential "
                "sampler, or use_seedable_sampler=True. Otherwise load the rest of the checkpoint, and use "
                "skip_first_batches."
            )
        point.position = steps * self._sharded.step_size * self.layout.position_scale * self._batches_per_step
        return point

    def skipping(self: Loader, num_batches: int) -> Loader:
        """Return a copy that shares epochs with this loader and first skips ``num_batches`` batches."""
        if num_batches == 0:
            # If the loaded epoch has no batches left, a script that skips none expects those of the next epoch.
            self.pass_over_finished_epoch()
        skipped = type(self).__new__(type(self))
        skipped.__dict__.update(self.__dict__)
        skipped.skip_batches = num_batches
        skipped._origin = self.origin
        return skipped

    def __getstate__(self) -> dict[str, Any]:
        """Return the loader between two epochs: an iteration in progress and live workers stay in this process."""
        clock = EpochClock(self._clock.upcoming)
        clock.pending, clock.keeps_finished = self._clock.pending, self._clock.keeps_finished
        base = copy.copy(self.base_dataloader)
        stop_workers(base)
        state = {**self.__dict__, "base_dataloader": base, "_clock": clock, "_workers": None}
        del state["gradient_state"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient_state=GradientState())
        self.reset()

    # Iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        hook = loop_hooks.current()
        if hook is not None:
            hook.begin(self)
            if not self.has_even_steps:
                hook = None
        skip, attributes = self.skip_batches, self.__dict__
        pending = self._clock.pending
        # A skip counts from the start of the saved epoch, unless the script chose the next one by set_epoch.
        if pending is not None and pending.finished and (not skip or self._clock.upcoming != pending.epoch):
            self._log_finished_epoch(pending.epoch)
            if self._clock.must_finish:
                self._finish_epoch(pending.epoch)
        iteration = self._clock.begin()
        if self._clock.from_start and not skip and iteration.can_rewind:
            iteration.rewind(keeps_order=self._sharded is not None)
        self.begin()
        try:
            self._forward_epoch(iteration.epoch)
            move, activate = batch_mover(self.device, self._non_blocking), self.gradient_state.activate
            device = devices.of(self.device)
            cut = None if device is None else device.batch_cutter()
            # Attributes are set through __dict__, because __setattr__ would cost more than the rest of this loop.
            for batch, last, real, remainder in self._steps(iteration, skip):
                iteration.steps += 1
                iteration.finished = last
                attributes["end_of_dataloader"] = last
                attributes["real_samples"] = real
                attributes["remainder"] = remainder
                yield iteration.remember(move(batch)) if activate(self) else move(batch)
                if cut is not None:
                    cut()
                if hook is not None:
                    hook.step(self)
        finally:
            iteration.close()
            if skip:
                self.skip_batches = 0
            if self._clock.current is iteration:
                self.end()

    def yielded(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is part of the current batch, or a view of a part.

        This is known while several loaders are open.
        """
        iteration = self._clock.current
        return iteration is not None and any(is_view(tensor, of) for of in iteration.tensors())

    def _finish_epoch(self, epoch: int) -> None:
        """Complete a loaded epoch without remaining batches, whose order the generators of later epochs depend on."""
        self._clock.upcoming = epoch
        iteration = self._clock.begin()
        self._forward_epoch(iteration.epoch)
        for _ in self._steps(iteration, 0):
            pass
        iteration.close()

    def _log_finished_epoch(self, epoch: int) -> None:
        if self._clock.keeps_finished:
            logger.warning(
                "Resuming in epoch %d, of which all batches were handed out: this iteration has none, and the code "
                "after the loop runs. To begin with epoch %d, use load_state instead of resume, or "
                "skip_first_batches(loader, 0).",
                epoch,
                epoch + 1,
            )
        else:
            logger.info("The state was saved after the last batch of epoch %d: resuming in epoch %d.", epoch, epoch + 1)

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        raise NotImplementedError

    def _synchronize_generators(self) -> None:
        kinds = [kind for kind in self.rng_types if kind != "generator"]
        if kinds and PartialState().collectives.world_size > 1:
            synchronize_rng_states(kinds)
        if self.synchronized_generator is not None and "generator" in self.rng_types:
            broadcast_generator(self.synchronized_generator)

    def _local_steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        """Return the steps of the torch loader in this process."""
        if self._sharded is not None:
            return self._map_style_steps(self._sharded, iteration, skip)
        return self._iterable_steps(iteration, skip)

    @property
    def _reads_ahead(self) -> bool:
        """True if this process reads map-style data ahead of the loop."""
        return self.layout.synchronize_steps and self.num_workers == 0

    def _map_style_steps(self, sharded: ShardedSampler, iteration: Iteration, skip: int) -> Iterator[Step]:
        resume = iteration.resume or ResumePoint(iteration.epoch, sharded.unit)
        position = skip * sharded.step_size if skip else resume.position // self.layout.position_scale
        sharded.begin_at(EpochStart(position, resume.order))
        tracker = ReadAheadTracker(partial(self._batches_out, iteration)) if self._reads_ahead else None
        iteration.tracker = tracker
        with preserve_rng() if resume.position or iteration.keeps_rng else nullcontext():
            batches = self._open(iteration)
            if tracker is not None and not skip:
                tracker.read_again(batches, resume.read_ahead)
        iteration.progress = sharded.progress
        steps = map_style_steps(batches if tracker is None else tracker.through(batches), sharded.progress)
        if self.layout.padding_at_end:
            steps = self.layout.with_padding_at_end(steps)
        return self._synchronized(steps)

    def _synchronized(self, steps: Iterator[Step], latest: Any = None) -> Iterator[Step]:
        return synchronized_steps(steps, PartialState().collectives, latest) if self.layout.synchronize_steps else steps

    def _open(self, iteration: Iteration, *, torch_only: bool = True) -> Iterator[Any]:
        """Begin the torch loader's iteration, with the generator states of the epoch's start if it is resumed."""
        generator = self.base_dataloader.generator
        resume = iteration.resume
        if isinstance(generator, torch.Generator):
            if resume is not None and "generator" in resume.begin:
                generator.set_state(resume.begin["generator"])
            iteration.begin = {"generator": generator.get_state()}
        elif resume is not None and "torch" in resume.begin:
            restore_rng(from_plain(resume.begin))
            iteration.begin = resume.begin
        else:
            iteration.begin = {"torch": torch.get_rng_state()} if torch_only else to_plain(capture_rng())
        if self.num_workers == 0:
            return iter(self.base_dataloader)
        if resume is not None:
            # Live workers are at another position.
            stop_workers(self.base_dataloader)
            workers = WorkerRngStates.from_plain(resume.workers) if resume.workers else WorkerRngStates()
        elif self._workers is not None and self._keeps_workers():
            workers = self._workers.for_next_epoch()
        else:
            workers = WorkerRngStates()
        iteration.workers = self._workers = workers
        track = self._sharded is not None or self.persistent_workers
        return workers.open(self.base_dataloader, partial(self._batches_out, iteration), track=track)

    # Iterating an iterable data set

    def _iterable_steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        in_process = self.num_workers == 0
        snapshot = self.base_dataloader.state_dict if self.use_stateful_dataloader else None  # type: ignore[attr-defined]
        if in_process or snapshot:
            iteration.tracker = ReadAheadTracker(partial(self._batches_out, iteration), in_process, snapshot)
        tracker, resume = iteration.tracker, iteration.resume
        if resume is None or not resume.position:
            batches = self._open(iteration, torch_only=False)
            self._drop(batches, iteration, skip)
        else:
            with preserve_rng():
                batches = self._reopen(iteration, resume, skip)
                if tracker is None:
                    # Read a batch here, so that the workers have finished the dropped ones before the loop begins.
                    batches = chain(list(islice(batches, 1)), batches)
                elif not skip:
                    tracker.read_again(batches, resume.read_ahead)
        if self.layout.synchronize_steps:
            yield from self._synchronized(open_ended_steps(batches, tracker), iteration.dropped)
        else:
            full = self.batch_size if self.layout.num_processes == 1 else None
            yield from lookahead_steps(batches, tracker, full)

    def _drop(self, batches: Iterator[Any], iteration: Iteration, count: int) -> None:
        """Read and drop batches: iterable data has no other way to skip them."""
        for batch in islice(batches, count):
            if iteration.first_batch is None:
                iteration.first_batch = batch
            iteration.dropped = batch
        iteration.position = count * self._units_per_batch

    def _reopen(self, iteration: Iteration, resume: ResumePoint, skip: int) -> Iterator[Any]:
        """Begin the epoch of an iterable data set again, and advance to the saved position."""
        if not skip and resume.unit != "steps":
            batches = self._reopen_at_sample(iteration, resume.position)
        else:
            restores_position = not skip and knows_position(resume.source)
            if restores_position:
                self.base_dataloader.load_state_dict(resume.source)  # type: ignore[attr-defined]
            batches = self._open(iteration)
            self._drop(batches, iteration, 0 if restores_position else skip or resume.position)
        if not skip:
            iteration.position = resume.position
        return batches

    def _reopen_at_sample(self, iteration: Iteration, position: int) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDatasetShard):
            self.dataset.begin_at(position)
            return self._open(iteration)
        base = self.base_dataloader
        batch_size = base.batch_size or 1
        if position % batch_size == 0:
            batches = self._open(iteration)
            self._drop(batches, iteration, position // batch_size)
            return batches
        # A state of several ranks that is continued on one: the position may be in the middle of a batch.
        shard = IterableDatasetShard(self.dataset, batch_size, base.drop_last)  # type: ignore[arg-type]
        shard.even_batches = False
        shard.begin_at(position)
        self.base_dataloader = type(base)(
            shard, batch_size=batch_size, drop_last=base.drop_last, **loader_settings(base)
        )
        try:
            return self._open(iteration)
        finally:
            self.base_dataloader = base
