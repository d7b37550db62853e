"""Loaders that are not torch's: webdataset's WebLoader, torchdata.nodes.Loader, and others that yield batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from .iterable_shard import is_already_split
from .samplers import innermost_sampler


class LoaderBatches(IterableDataset[Any]):
    """The batches of another loader, as an iterable data set."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        stages = getattr(loader, "pipeline", ())
        inner = [stage.dataset for stage in stages if isinstance(stage, DataLoader)]
        sources = node_sources(loader)
        split_below = bool(sources) and all(map(is_split_source, sources))
        self.already_sharded: bool = split_below or is_already_split(loader) or any(map(is_already_split, inner))

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class StatefulLoaderBatches(LoaderBatches):
    """Those of a loader that can save its position."""

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def is_other_loader(obj: Any) -> bool:
    """Return True if an object may be a loader of another library: it yields batches each time it is iterated."""
    if isinstance(obj, Dataset):
        # WebLoader is one to torch; other data sets need a DataLoader.
        return type(obj).__name__ == "WebLoader"
    plain = isinstance(obj, (Iterator, Mapping, list, tuple, str, bytes, type))
    return not plain and callable(getattr(obj, "__iter__", None))


def is_known_loader(obj: Any) -> bool:
    """Return True if an object is certainly a loader of another library, which ``Accelerator.prepare`` recognises."""
    module, name = type(obj).__module__, type(obj).__name__
    return (module.startswith("torchdata.nodes") and name == "Loader") or (
        module.startswith("webdataset") and name == "WebLoader"
    )


def node_sources(loader: Any) -> list[Any]:
    """Return the samplers and data that the nodes of torchdata read below a loader or a node.

    Empty for other loaders.
    """
    found: dict[int, Any] = {}
    waiting, seen = [loader], {id(loader)}
    while waiting:
        node = waiting.pop()
        if not _is_node(node):
            continue
        for name, value in vars(node).items():
            if name in ("iterable", "sampler"):  # of IterableWrapper and SamplerWrapper
                found[id(value)] = _source(value)
            inner = value.values() if isinstance(value, Mapping) else (value,)
            waiting += [each for each in inner if id(each) not in seen]
            seen.update(map(id, inner))
    return list(found.values())


def _is_node(value: Any) -> bool:
    return any(kind.__module__.startswith("torchdata.nodes") for kind in type(value).__mro__)


def is_split_source(source: Any) -> bool:
    """Return True if a source of nodes is a rank's part already."""
    return source.num_replicas > 1 if isinstance(source, DistributedSampler) else is_already_split(source)


def _source(read: Any) -> Any:
    """Return what determines the samples of what a node reads."""
    if isinstance(read, DataLoader):
        read = read.dataset if isinstance(read.dataset, IterableDataset) else read.batch_sampler or read.sampler
    return innermost_sampler(read) if isinstance(read, Sampler) else read


def as_torch_loader(loader: Any) -> DataLoader[Any]:
    """Return a torch loader that yields the batches of another loader."""
    has_state = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return DataLoader((StatefulLoaderBatches if has_state else LoaderBatches)(loader), batch_size=None)
