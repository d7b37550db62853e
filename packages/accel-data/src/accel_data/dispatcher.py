"""One rank reads, and deals the batches to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accel_state.enums import RNGType
from accel_state.state import PartialState

from .batch_scatter import Dealer, Round, receive_round, send_error, send_round
from .batch_shard import BatchSamplerShard
from .epoch_rng import GlobalRandomState
from .layout import LoaderLayout, data_ranks
from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration


class DataLoaderDispatcher(PreparedLoader):
    """A loader that reads on rank 0 only and sends every rank its batch: for data that cannot be read in several
    processes.

    :func:`accel_data.prepare_data_loader` makes one with ``dispatch_batches=True``. Without ``split_batches`` rank 0
    reads a batch for each rank in a step; with it one batch, which is sliced. Batches may hold tensors, arrays, strings
    and any picklable object. An error on rank 0 is raised on every rank.

    Args:
        dataset: data set to load; read on rank 0 only.
        split_batches: slice each batch, rather than deal out whole batches.
        skip_batches: steps to leave out in the first iteration.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        _drop_last: leave out a last step that is not full.
        _non_blocking: move batches without waiting for the copy.
        slice_fn: ``slice_fn(batch, slice, process_index=, num_processes=)`` cuts the batch of a rank out of the batches
            of a step, joined; None means along the first dimension.
        torch_device_mesh: the mesh that the ranks are arranged in; ranks that differ along tp, cp, sp or pp only get
            the same batch.
        iteration: epoch of the first iteration.
        **kwargs: arguments of the torch loader.
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
            non_blocking=_non_blocking,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.layout = LoaderLayout(*data_ranks(None, None, torch_device_mesh))
        self._drop_last = _drop_last
        self.dealer = Dealer(
            self.layout.num_processes, split_batches, self._read_batch_size(), _drop_last, slice_fn=slice_fn
        )
        self._round = Round()
        # Of ranks that share a batch only one has read it; what it drew for that the others must not draw later.
        self._shares_batches = self.layout.num_processes < PartialState().num_processes
        if self._stream is not None:
            # Only rank 0 begins the sampler, so there is nobody to agree with.
            self._stream.order.synchronize = False
        self.set_even_batches(True)

    def _read_batch_size(self) -> int | None:
        """Samples in a batch as rank 0 reads it; None where a batch sampler may do as it likes."""
        stream = self._stream
        if isinstance(stream, BatchSamplerShard):
            return stream.batch_size if stream.is_plain else None
        return self.base_dataloader.batch_size

    def set_even_batches(self, even_batches: bool) -> None:
        """Choose whether the last step is completed with samples from the start of the epoch, so that all ranks get
        batches of one size.
        """
        self.dealer.even_batches = even_batches
        if isinstance(self._stream, BatchSamplerShard) and self._stream.is_plain:
            self._stream.complete_to = self.layout.num_processes if even_batches and not self._drop_last else 1

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples in a full batch of one rank; None where batches have no fixed size."""
        size = self.dealer.batch_size
        return size // self.layout.num_processes if size is not None and self.split_batches else size

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """Whether the ranks' batches of the current step differ in size; the same on all ranks."""
        return self._round.ragged

    def __len__(self) -> int:
        batches = len(self.base_dataloader)
        full, rest = divmod(batches, self.dealer.batches_a_round)
        steps = full + (1 if rest and not self._drop_last else 0)
        return max(0, steps - self.skip_batches)

    def set_rng_types(self, rng_types: list[str | RNGType]) -> None:
        """Choose the generators that are made equal to rank 0's at the start of an iteration. That of the sampler stays
        rank 0's own.
        """
        self.rng_types = [str(kind) for kind in rng_types]

    def _position(self, current: Iteration) -> int:
        return self._round.position

    @property
    def _batches_a_step(self) -> int:
        return self.dealer.batches_a_round

    @property
    def _reads_ahead(self) -> bool:
        # Whether a step is the last one depends on the next one being full.
        return self.dealer.drop_last and self.num_workers == 0

    @property
    def has_even_steps(self) -> bool:
        """True: a step is dealt to all ranks, or to none."""
        return True

    def _readers(self) -> int:
        return 1

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self._synchronize_generators()
        self._round = Round()
        rounds = self._read_rounds(iteration, skip) if PartialState().process_index == 0 else self._receive_rounds()
        rank = self.layout.process_index
        for round_ in rounds:
            self._round = round_
            yield round_.parts[rank], round_.last, round_.real[rank], round_.remainder

    def _receive_rounds(self) -> Iterator[Round]:
        collectives = PartialState().collectives
        while (round_ := receive_round(collectives, self.device)) is not None:
            if round_.random is not None and self.layout.process_index == 0:
                round_.random.restore()
            yield round_
            if round_.last:
                return

    def _read_rounds(self, iteration: Iteration, skip: int) -> Iterator[Round]:
        collectives = PartialState().collectives
        rounds = self._deal(iteration, skip)
        last = False
        while not last:
            try:
                round_ = next(rounds, None)
            except Exception as error:
                send_error(collectives, error)
                raise
            if round_ is not None and self._shares_batches:
                round_.random = GlobalRandomState.capture()
            if collectives.world_size > 1:
                send_round(collectives, round_)
            if round_ is None:
                return
            last = round_.last
            yield round_
        next(rounds, None)

    def _deal(self, iteration: Iteration, skip: int) -> Iterator[Round]:
        batches_a_round = self.dealer.batches_a_round
        steps = self._local_steps(iteration, skip * batches_a_round)
        for count, (batches, padding, last) in enumerate(self.dealer.rounds(steps), start=1):
            if iteration.first_batch is None:
                iteration.first_batch = batches[0]
            round_ = self.dealer.deal(batches, padding, iteration.first_batch)
            round_.last = last
            round_.position = self._read_position(iteration, count * batches_a_round)
            yield round_

    def _read_position(self, iteration: Iteration, batches: int) -> int:
        """Position in the stream after that many batches of the torch loader."""
        if iteration.progress is not None:
            return iteration.progress.position_after(batches)
        return iteration.position + batches * self._units_a_batch()
