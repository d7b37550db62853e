"""Leaving out the first batches of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_state.errors import ConfigurationError

from .adapter import loader_settings, stateful_dataloader_class
from .batch_shard import stream_arguments
from .loader import PreparedLoader
from .lookahead import Step
from .resume_state import Iteration


class SkipDataLoader(PreparedLoader):
    """A loader whose first iteration leaves out the first batches; those after it are whole.

    On map-style data nothing is read for the batches that are left out.

    Args:
        dataset: data set to load.
        skip_batches: batches to leave out in the first iteration.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        **kwargs: arguments of the torch loader.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, rng_types=[], **kwargs
        )

    def _steps(self, iteration: Iteration, skip: int) -> Iterator[Step]:
        return self._local_steps(iteration, skip)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader like this one whose first iteration leaves out the first batches. Every setting stays; later iterations
    are whole.

    On map-style data nothing is read for the batches that are left out; an iterable data set has to be read up to
    there.

    Args:
        dataloader: a prepared loader, or any torch loader. The epochs of a prepared loader and of what is made from it
            count on together: iterate the result first and then ``dataloader`` itself, for the epochs that follow.
        num_batches: batches of this process to leave out, counted from the start of the epoch.

    Raises:
        ConfigurationError: ``num_batches`` is negative.
    """
    if num_batches < 0:
        raise ConfigurationError(f"num_batches={num_batches} is not a number of batches; it must be at least 0")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        batching: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    else:
        batching = stream_arguments(dataloader)
    return SkipDataLoader(
        dataloader.dataset,
        skip_batches=num_batches,
        use_stateful_dataloader=is_stateful(dataloader),
        **batching,
        **loader_settings(dataloader),
    )


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Whether this is a StatefulDataLoader of torchdata."""
    return type(dataloader).__module__.startswith("torchdata.") and isinstance(dataloader, stateful_dataloader_class())
