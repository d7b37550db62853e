"""Loaders in which every rank reads its own shard, and skipping the first batches of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader, IterableDataset

from accel_state.errors import ConfigurationError, check_type

from .adapter import T_co, loader_settings, stateful_dataloader_class
from .batch_shard import sampler_arguments
from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration

T = TypeVar("T")
Prepared = TypeVar("Prepared", bound=PreparedLoader)


class DataLoaderShard(PreparedLoader[T_co]):
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

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        self._synchronize_generators()
        return self._local_steps(iteration, skip)


class SkipDataLoader(PreparedLoader[T_co]):
    """A loader that skips the first batches in its first iteration only.

    On map-style data nothing is read for the skipped batches.

    Args are those of :class:`DataLoaderShard`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, rng_types=[], **kwargs
        )

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        return self._local_steps(iteration, skip)


@overload
def skip_first_batches(dataloader: Prepared, num_batches: int = 0) -> Prepared: ...
@overload
def skip_first_batches(dataloader: DataLoader[T], num_batches: int = 0) -> DataLoader[T]: ...
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader with the same settings that skips the first batches in its first iteration only.

    On map-style data nothing is read for the skipped batches; an iterable data set has to be read up to there.

    Args:
        dataloader: a prepared loader, or any torch loader. The result for a prepared loader shares its epoch count:
            iterate the result first, and then ``dataloader`` for the epochs that follow.
        num_batches: batches of this process to skip, counted from the start of the epoch.

    Raises:
        ConfigurationError: ``num_batches`` is negative.
    """
    given: Any = num_batches
    if isinstance(given, float) and given.is_integer():
        num_batches = int(given)
    if not hasattr(num_batches, "__index__"):
        raise ConfigurationError(f"num_batches={num_batches!r} must be an integer")
    if num_batches < 0:
        raise ConfigurationError(f"num_batches={num_batches} must be at least 0")
    if not hasattr(dataloader, "dataset"):
        check_type(dataloader, DataLoader, "skip_first_batches", "Pass a DataLoader, prepared or not.")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        batching: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    else:
        batching = sampler_arguments(dataloader)
    from_torchdata = type(dataloader).__module__.startswith("torchdata.")
    return SkipDataLoader(
        dataloader.dataset,
        skip_batches=num_batches,
        use_stateful_dataloader=from_torchdata and isinstance(dataloader, stateful_dataloader_class()),
        **batching,
        **loader_settings(dataloader),
    )
