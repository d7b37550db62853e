"""Loader in which every rank reads its own shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel_state.enums import RNGType

from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration


class DataLoaderShard(PreparedLoader):
    """A loader that reads this rank's shard of the data and moves the batches to the device.

    :func:`accel_data.prepare_data_loader` makes one from any loader.

    Args:
        dataset: data set to load; an iterable one is already this rank's shard.
        device: device to move batches to; None leaves them where they are.
        rng_types: generators to copy from rank 0 at the start of an iteration: "generator" (that of the sampler; the
            default), "torch", "cuda", "numpy", "python", ... An empty list copies none.
        synchronized_generator: another generator to copy along with "generator".
        skip_batches: batches to skip in the first iteration.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        _drop_last: whether the original loader drops its last batch.
        _non_blocking: copy batches to the device asynchronously.
        torch_device_mesh: device mesh of the ranks.
        iteration: epoch of the first iteration.
        **kwargs: arguments of the torch loader. A BatchSamplerShard as ``batch_sampler`` shards map-style data.
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
        if self._sharded is not None:
            self.layout.num_processes = self._sharded.num_processes
            self.layout.process_index = self._sharded.process_index

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self._synchronize_generators()
        return self._local_steps(iteration, skip)
