"""Loader in which rank 0 reads the data and sends every rank its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accel_state.enums import RNGType
from accel_state.state import PartialState

from .adapter import T_co
from .batch_scatter import (
    BatchSplitter,
    GlobalStep,
    UnsendableError,
    check_tensors,
    receive_step,
    send_error,
    send_step,
)
from .batch_shard import BatchSamplerShard
from .layout import LoaderLayout, data_ranks, has_part_per_rank
from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration
from .rng_state import capture_rng, restore_rng


class DataLoaderDispatcher(PreparedLoader[T_co]):
    """A loader that reads on rank 0 only and sends every rank its batch, for data that one process must read.

    :func:`accel_data.prepare_data_loader` makes one with ``dispatch_batches=True``. Without ``split_batches`` rank 0
    reads one batch per rank and step; with it one batch per step, which is sliced. Batches may contain tensors, arrays,
    strings and any picklable object, but no sparse or nested tensors. An error on rank 0 is raised on every rank.

    The batches of an incomplete last step are joined and divided equally. They stay whole if values that do not have
    one entry per sample (a count, a name, weights of classes) differ between them or from the epoch's first batch.

    Args:
        dataset: data set to load; read on rank 0 only.
        split_batches: slice each batch instead of distributing whole batches.
        _drop_last: drop an incomplete last step.
        slice_fn: ``slice_fn(batch, slice, process_index=, num_processes=)`` cuts the batch of a rank out of the joined
            batches of a step; None slices along the first dimension.
        torch_device_mesh: device mesh of the ranks; those that differ only along tp, cp, sp or pp get the same batch.
        **kwargs: arguments of the torch loader. Other arguments are those of :class:`DataLoaderShard`.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device=PartialState().device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.layout: LoaderLayout = LoaderLayout(*data_ranks(None, None, torch_device_mesh))
        read_size = self.base_dataloader.batch_size
        if isinstance(self._sharded, BatchSamplerShard):
            read_size = self._sharded.batch_size if self._sharded.is_plain else None
        self.splitter: BatchSplitter = BatchSplitter(
            self.layout.num_processes, split_batches, read_size, _drop_last, True, slice_fn
        )
        self._global_step = GlobalStep()
        # Of ranks that share a batch only one has read it; the others must not fall behind in random numbers.
        self._shares_batches = self.layout.num_processes < PartialState().num_processes
        self._has_part_per_rank = has_part_per_rank(self.layout.num_processes, torch_device_mesh)
        if self._sharded is not None:
            # Only rank 0 begins the sampler, so there is nothing to synchronize.
            self._sharded.rng.synchronize = False
        self.set_even_batches(True)

    def set_even_batches(self, even_batches: bool) -> None:
        """Choose whether an incomplete last step is completed with samples from the start of the epoch."""
        self.splitter.even_batches = even_batches
        if isinstance(self._sharded, BatchSamplerShard) and self._sharded.is_plain:
            self._sharded.complete_to = self.layout.num_processes if even_batches and not self._drop_last else 1

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples in a full batch of one rank; None if batches have no fixed size."""
        size = self.splitter.batch_size
        return size // self.layout.num_processes if size is not None and self.split_batches else size

    @property
    def padded_batch_size(self) -> int:
        """Samples in this rank's batch of a last step with a ``remainder``, which the ranks divide."""
        return -(-self.remainder // self.layout.num_processes)

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """True if the ranks' batches of the current step differ in size; the same on all ranks."""
        return self._global_step.ragged

    def __len__(self) -> int:
        full, rest = divmod(len(self.base_dataloader), self._batches_per_step)
        steps = full + (1 if rest and not self._drop_last else 0)
        return max(0, steps - self.skip_batches)

    def set_rng_types(self, rng_types: Sequence[str | RNGType]) -> None:
        """Choose the generators to copy from rank 0 at the start of an iteration; the sampler's stays on rank 0."""
        self.rng_types: list[str] = [str(kind) for kind in rng_types]

    def _position(self, iteration: Iteration) -> int:
        return self._global_step.position

    @property
    def _batches_per_step(self) -> int:
        return self.splitter.batches_per_step

    @property
    def _reads_ahead(self) -> bool:
        # Whether a step is the last one depends on the next one being complete.
        return self.splitter.drop_last and self.num_workers == 0

    @property
    def has_padding(self) -> bool:
        """True if a batch of the current step has padding, or another size than those of other ranks."""
        return self.ragged or any(real is not None for real in self._global_step.real)

    @property
    def has_even_steps(self) -> bool:
        """True: every step has a batch for each rank."""
        return True

    @property
    def _num_readers(self) -> int:
        return 1

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self._synchronize_generators()
        self._global_step = GlobalStep()
        steps = self._read_steps(iteration, skip) if PartialState().process_index == 0 else self._receive_steps()
        rank = self.layout.process_index
        for step in steps:
            self._global_step = step
            yield step.parts[rank], step.last, step.real[rank], step.remainder

    def _receive_steps(self) -> Iterator[GlobalStep]:
        collectives = PartialState().collectives
        while (step := receive_step(collectives, self.device, self._has_part_per_rank)) is not None:
            if step.rng is not None and self.layout.process_index == 0:
                restore_rng(step.rng)
            yield step
            if step.last:
                return

    def _read_steps(self, iteration: Iteration, skip: int) -> Iterator[GlobalStep]:
        collectives = PartialState().collectives
        steps = self._split(iteration, skip)
        last = False
        while not last:
            try:
                step = next(steps, None)
            except Exception as error:
                send_error(collectives, error)
                raise
            if step is not None and self._shares_batches:
                step.rng = capture_rng()
            if collectives.world_size > 1:
                try:
                    send_step(collectives, step, self._has_part_per_rank)
                except UnsendableError as error:
                    send_error(collectives, error)
                    raise
            if step is None:
                return
            last = step.last
            yield step
        next(steps, None)

    def _split(self, iteration: Iteration, skip: int) -> Iterator[GlobalStep]:
        batches_per_step = self._batches_per_step
        local_steps = self._local_steps(iteration, skip * batches_per_step)
        for count, (batches, padding, last) in enumerate(self.splitter.group(local_steps), start=1):
            if PartialState().num_processes > 1:
                for batch in batches:
                    check_tensors(batch)
            if iteration.first_batch is None:
                iteration.first_batch = batches[0]
            step = self.splitter.split(batches, padding, iteration.first_batch)
            step.last = last
            if iteration.progress is not None:
                step.position = iteration.position_after(iteration.progress, count * batches_per_step)
            else:
                step.position = iteration.position + count * batches_per_step * self._units_per_batch
            yield step
