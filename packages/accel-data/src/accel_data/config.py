"""Settings for preparing data loaders."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.arguments import check_flags, check_number


@dataclass
class DataLoaderConfiguration:
    """Settings for the data loaders that an Accelerator prepares.

    Attributes:
        split_batches: the loader's batch size is the global one and must be a multiple of the number of processes.
            Otherwise it is the batch size of each process.
        dispatch_batches: read on the main process only and send batches to the other processes. None does so for
            iterable data sets that cannot be sharded at the source.
        even_batches: give every process the same number of full batches, by repeating samples from the start at the
            end of an epoch.
        use_seedable_sampler: make the order of a shuffled loader depend only on a seed and the epoch.
        data_seed: that seed; None uses the main process's ``torch.initial_seed()``.
        non_blocking: copy batches to the device asynchronously; useful with ``pin_memory=True``.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader, which saves the state of data sets that have
            ``state_dict``. Prepared loaders can be resumed without it.
        already_sharded: each process's loader already reads only its own shard; only keep the number of steps equal.
            For single loaders, set ``already_sharded = True`` on the loader or its data set instead.
        elastic: make steps independent of the number of processes. The loader's batch size is the global one, and
            samples, their order and all random numbers depend on ``data_seed``, the epoch and the position only. The
            prepared loader yields micro batches: this process's logical shards of each global batch, and the optimizer
            steps after the last of them. A state resumes on any number of processes and workers.
        logical_shards: with ``elastic``, the number of parts that each global batch is computed in; the largest useful
            number of processes. It has to stay the same for the numbers to stay the same.

    Raises:
        ConfigurationError: ``logical_shards`` or ``data_seed`` is not a whole number, or a switch is not True or False.

    Examples:
        >>> configuration = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=7)
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    already_sharded: bool = False
    elastic: bool = False
    logical_shards: int = 8

    def __post_init__(self) -> None:
        check_flags(self)
        check_number("DataLoaderConfiguration.logical_shards", self.logical_shards, at_least=1, whole=True)
        if self.data_seed is not None:
            check_number("DataLoaderConfiguration.data_seed", self.data_seed, whole=True)
