"""How loaders are prepared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DataLoaderConfiguration:
    """How an Accelerator prepares loaders.

    Attributes:
        split_batches: the loader's batch size is that of all processes together, and must be a multiple of their
            number. Otherwise it is that of each process.
        dispatch_batches: read on the main process only and send the batches to the others. None does so for an iterable
            data set that cannot be split at its source.
        even_batches: give every process the same number of full batches, by repeating samples from the start at the end
            of an epoch.
        use_seedable_sampler: let the order of a shuffled loader depend on a seed and the epoch only.
        data_seed: that seed; None takes torch's initial seed of the main process.
        non_blocking: move batches to the device without waiting for the copy; of use with ``pin_memory=True``.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader, which keeps the position of data sets that
            have a state of their own. Every prepared loader can be resumed without it.
        already_sharded: each process's loader holds its own part of the data already; leave its samples to it, and only
            keep the number of steps equal. For single loaders, set ``already_sharded = True`` on the loader or its data
            set instead.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    already_sharded: bool = False
