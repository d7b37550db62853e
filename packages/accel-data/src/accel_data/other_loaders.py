"""Loaders that are not torch's: webdataset's WebLoader, torchdata.nodes.Loader, and others that yield batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from .iterable_shard import is_already_split


class LoaderBatches(IterableDataset[Any]):
    """The batches of another loader, as an iterable data set."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        stages = getattr(loader, "pipeline", ())
        inner = [stage.dataset for stage in stages if isinstance(stage, DataLoader)]
        self.already_sharded = is_already_split(loader) or any(map(is_already_split, inner))

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class StatefulLoaderBatches(LoaderBatches):
    """Those of a loader that can save its position."""

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def is_other_loader(obj: Any) -> bool:
    """Whether an object may be a loader of another library: it yields batches each time it is iterated."""
    if isinstance(obj, Dataset):
        # WebLoader is one to torch; other data sets need a DataLoader.
        return type(obj).__name__ == "WebLoader"
    plain = isinstance(obj, (Iterator, Mapping, list, tuple, str, bytes, type))
    return not plain and callable(getattr(obj, "__iter__", None))


def is_known_loader(obj: Any) -> bool:
    """Whether an object is certainly a loader of another library, which ``Accelerator.prepare`` recognises."""
    module, name = type(obj).__module__, type(obj).__name__
    return (module.startswith("torchdata.nodes") and name == "Loader") or (
        module.startswith("webdataset") and name == "WebLoader"
    )


def as_torch_loader(loader: Any) -> DataLoader[Any]:
    """A torch loader that yields the batches of another loader."""
    has_state = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return DataLoader((StatefulLoaderBatches if has_state else LoaderBatches)(loader), batch_size=None)
