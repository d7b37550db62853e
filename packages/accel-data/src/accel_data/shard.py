"""Every rank reads its own share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel_state.enums import RNGType

from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration


class DataLoaderShard(PreparedLoader):
    """A loader that reads this rank's share of the data, in an order that all ranks agree on, and moves the batches to
    the device.

    :func:`accel_data.prepare_data_loader` makes one from any loader.

    Args:
        dataset: data set to load; an iterable one holds this rank's share already.
        device: where batches are moved; None leaves them where they are.
        rng_types: generators that are made equal to rank 0's at the start of an iteration: "generator" (that of the
            sampler; the default), "torch", "cuda", "numpy", "python", ... An empty list leaves all of them alone.
        synchronized_generator: a generator besides that of the sampler that "generator" stands for.
        skip_batches: batches to leave out in the first iteration.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        _drop_last: whether the loader that this was made from drops its last batch.
        _non_blocking: move batches without waiting for the copy.
        torch_device_mesh: the mesh that the ranks are arranged in.
        iteration: epoch of the first iteration.
        **kwargs: arguments of the torch loader. A ``batch_sampler`` that is a BatchSamplerShard makes the share of
            map-style data.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            non_blocking=_non_blocking,
            iteration=iteration,
            **kwargs,
        )
        self._drop_last = _drop_last
        self.torch_device_mesh = torch_device_mesh
        if self._stream is not None:
            self.layout.num_processes = self._stream.num_processes
            self.layout.process_index = self._stream.process_index

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self._synchronize_generators()
        return self._local_steps(iteration, skip)
