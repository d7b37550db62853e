"""Making a prepared loader of any loader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from accel_state.enums import RNGType
from accel_state.errors import ConfigurationError
from accel_state.state import PartialState

from .adapter import loader_settings, warn_about_lost_iteration
from .batch_shard import stream_arguments
from .dispatcher import DataLoaderDispatcher
from .iterable_shard import (
    CountingCollate,
    IterableDatasetShard,
    StatefulIterableDatasetShard,
    can_shard_at_source,
    is_already_split,
    shard_at_source,
)
from .layout import LoaderLayout, data_ranks, layout_of_distributed_sampler
from .loader import PreparedLoader
from .samplers import SeedableRandomSampler, innermost_sampler
from .shard import DataLoaderShard
from .shard_math import check_rank, per_process_batch_size


@dataclass
class _Request:
    """What prepare_data_loader was asked for, resolved."""

    dataloader: DataLoader[Any]
    device: torch.device | None
    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    rng_types: list[str | RNGType] | None
    non_blocking: bool
    stateful: bool
    mesh: Any

    @property
    def dataset(self) -> Any:
        return self.dataloader.dataset

    @property
    def iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def settings(self) -> dict[str, Any]:
        settings = loader_settings(self.dataloader)
        if not self.stateful:
            settings.pop("snapshot_every_n_steps", None)
        return settings

    def shard(self, dataset: Any, layout: LoaderLayout, **kwargs: Any) -> DataLoaderShard:
        generator = getattr(dataset, "generator", None) if self.iterable else None
        loader = DataLoaderShard(
            dataset,
            device=self.device,
            rng_types=self.rng_types,
            synchronized_generator=generator if isinstance(generator, torch.Generator) else None,
            use_stateful_dataloader=self.stateful,
            _drop_last=self.dataloader.drop_last,
            _non_blocking=self.non_blocking,
            torch_device_mesh=self.mesh,
            **{**self.settings(), **kwargs},
        )
        loader.layout = layout
        return loader


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    already_sharded: bool = False,
) -> DataLoader[Any]:
    """A loader like this one that reads this process's share of the data.

    Map-style data is shared by its sampler. Of iterable data each rank is given sources of its own if the data set
    offers ``shard(num_shards, index)`` and has at least as many ``num_shards`` as there are processes; otherwise one
    rank reads and sends (``dispatch_batches``), or each rank reads all of it and keeps its part.

    Every loader knows its last batch, counts its epochs, and has ``state_dict`` and ``load_state_dict`` that resume it
    exactly.

    Args:
        dataloader: any torch loader. A prepared one is returned as it is.
        device: where batches are moved, with ``put_on_device``; None takes this process's device.
        num_processes: number of ranks that share the data; None takes the run's. A mesh decides on both.
        process_index: this rank among them; None takes the run's.
        split_batches: the loader's batch size is that of all processes together. Otherwise it is that of each process.
        put_on_device: move batches to the device.
        rng_types: generators that are made equal to rank 0's at the start of an iteration: "generator" (that of the
            sampler; the default), "torch", "cuda", "numpy", "python", ...
        dispatch_batches: read on rank 0 only and send the batches to the others. None does so for iterable data that
            cannot be split at its source, if ``put_on_device`` is set.
        even_batches: give every rank the same number of full batches, by repeating samples from the start at the end of
            an epoch.
        slice_fn_for_dispatch: ``slice_fn(batch, slice, process_index=, num_processes=)`` cuts a rank's batch when
            dispatching.
        use_seedable_sampler: let the order of a shuffled loader depend on a seed and the epoch only.
        data_seed: that seed; None takes torch's initial seed of rank 0.
        non_blocking: move batches without waiting for the copy.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        torch_device_mesh: the mesh that the ranks are arranged in; ranks that differ along tp, cp, sp or pp only get
            the same data.
        already_sharded: this loader holds the rank's part of the data already. A loader or data set with an attribute
            ``already_sharded = True``, or with a :class:`torch.utils.data.DistributedSampler`, is recognised without
            it.

    Raises:
        ConfigurationError: the arguments contradict each other; the message says which, and what is allowed.
        MissingDependencyError: ``use_stateful_dataloader`` without torchdata.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    warn_about_lost_iteration(dataloader)
    size, rank = data_ranks(num_processes, process_index, torch_device_mesh)
    check_rank(size, rank)
    if use_seedable_sampler:
        dataloader = _seedable(dataloader, data_seed)
    target = (PartialState().device if device is None else device) if put_on_device else None
    request = _Request(
        dataloader,
        target,
        size,
        rank,
        split_batches,
        even_batches,
        rng_types,
        non_blocking,
        use_stateful_dataloader,
        torch_device_mesh,
    )
    declared = already_sharded or getattr(dataloader, "already_sharded", False) or is_already_split(dataloader.dataset)
    dispatch = _resolve_dispatch(request, dispatch_batches, put_on_device, declared)
    if split_batches and dataloader.batch_size is not None:
        per_process_batch_size(dataloader.batch_size, size)
    if dispatch:
        return _dispatcher(request, slice_fn_for_dispatch)
    return _shard(request, declared)


def _resolve_dispatch(request: _Request, dispatch_batches: bool | None, put_on_device: bool, declared: bool) -> bool:
    if dispatch_batches and declared:
        raise ConfigurationError(
            "dispatch_batches=True reads on rank 0 only, but the loader is declared to hold a part of the data on "
            "each rank "
            "(already_sharded). Choose one of them."
        )
    if dispatch_batches is not None:
        return dispatch_batches
    return (
        request.iterable
        and put_on_device
        and request.num_processes > 1
        and not declared
        and not can_shard_at_source(request.dataset, request.num_processes)
    )


def _seedable(dataloader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """The loader with a sampler that depends on seed and epoch only, if it had a random one. The given loader stays as
    it is.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return dataloader
    holder: Any = dataloader.batch_sampler
    sampler = dataloader.sampler if holder is None else getattr(holder, "sampler", None)
    if type(sampler) is not RandomSampler and not _is_torchdata_random(sampler):
        return dataloader
    if data_seed is None:
        data_seed = PartialState().collectives.broadcast_object(torch.initial_seed())
    random: Any = sampler
    seedable = SeedableRandomSampler(random.data_source, random.replacement, random._num_samples, data_seed=data_seed)
    copied = copy.copy(dataloader)
    # torch guards these attributes of a loader, because a running iteration would not see the change; this copy has
    # none.
    if holder is None:
        object.__setattr__(copied, "sampler", seedable)
    else:
        object.__setattr__(copied, "batch_sampler", copy.copy(holder))
        copied.batch_sampler.sampler = seedable  # type: ignore[union-attr]
    return copied


def _is_torchdata_random(sampler: Any) -> bool:
    return type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.startswith("torchdata.")


def _shard(request: _Request, declared: bool) -> DataLoaderShard:
    if request.iterable:
        return _iterable_shard(request, declared)
    dataloader = request.dataloader
    sampler = innermost_sampler(dataloader.batch_sampler or dataloader.sampler)
    layout = LoaderLayout(request.num_processes, request.process_index)
    if isinstance(sampler, DistributedSampler):
        batch_size, drop_last = dataloader.batch_size, dataloader.drop_last
        layout = layout_of_distributed_sampler(
            sampler, batch_size, drop_last, request.num_processes, request.process_index
        )
    elif declared:
        layout = _declared_layout(request)
    else:
        even = request.even_batches and request.num_processes > 1
        shared = stream_arguments(dataloader, request.num_processes, request.process_index, request.split_batches, even)
        return request.shard(request.dataset, layout, **shared)
    return request.shard(request.dataset, layout, **stream_arguments(dataloader))


def _declared_layout(request: _Request) -> LoaderLayout:
    several = request.num_processes > 1
    return LoaderLayout(
        request.num_processes, request.process_index, ragged=several, synchronize_steps=several, elastic=not several
    )


def _iterable_shard(request: _Request, declared: bool) -> DataLoaderShard:
    dataloader, dataset, size = request.dataloader, request.dataset, request.num_processes
    batching = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if size == 1:
        return request.shard(dataset, LoaderLayout(), **batching)
    if declared:
        return request.shard(dataset, _declared_layout(request), **_local_batching(request))
    if can_shard_at_source(dataset, size):
        own = shard_at_source(dataset, size, request.process_index)
        return request.shard(own, _declared_layout(request), **_local_batching(request))
    return _stream_shard(request)


def _local_batching(request: _Request) -> dict[str, Any]:
    """Batching of a loader whose data is this rank's own."""
    size = request.dataloader.batch_size
    if size is not None and request.split_batches:
        size = per_process_batch_size(size, request.num_processes)
    return {"batch_size": size, "drop_last": request.dataloader.drop_last}


def _stream_shard(request: _Request) -> DataLoaderShard:
    """Each rank reads the whole stream and keeps its part."""
    dataloader, dataset = request.dataloader, request.dataset
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    shard_class = StatefulIterableDatasetShard if has_state else IterableDatasetShard
    shard = shard_class(
        dataset,
        batch_size=dataloader.batch_size or 1,
        drop_last=dataloader.drop_last,
        num_processes=request.num_processes,
        process_index=request.process_index,
        split_batches=request.split_batches and dataloader.batch_size is not None,
    )
    shard.even_batches = request.even_batches
    shard.mark_tail = True
    # Each worker completes the end of its own stream, so padding may come in the middle, and batches with it may be of
    # any rank.
    uneven = not request.even_batches or dataloader.num_workers > 1 or dataloader.batch_size is None
    layout = LoaderLayout(request.num_processes, request.process_index, ragged=uneven)
    collate = CountingCollate(dataloader.collate_fn, batched=dataloader.batch_size is not None)
    batch_size = None if dataloader.batch_size is None else shard.local_batch_size
    loader = request.shard(shard, layout, batch_size=batch_size, collate_fn=collate)
    if isinstance(getattr(dataset, "generator", None), torch.Generator):
        loader.synchronized_generator = dataset.generator
    return loader


def _dispatcher(request: _Request, slice_fn: Callable[..., Any] | None) -> DataLoaderDispatcher:
    dataloader = request.dataloader
    state = PartialState()
    if data_ranks(None, None, request.mesh) != (request.num_processes, request.process_index):
        raise ConfigurationError(
            f"dispatching sends batches between the processes of the run, of which this is rank {state.process_index} "
            "of "
            f"{state.num_processes}; it cannot serve rank {request.process_index} of {request.num_processes}. Leave "
            "out num_processes and "
            "process_index, or use dispatch_batches=False."
        )
    if request.iterable:
        batching: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    else:
        batching = stream_arguments(dataloader)
    loader = DataLoaderDispatcher(
        request.dataset,
        split_batches=request.split_batches,
        use_stateful_dataloader=request.stateful,
        _drop_last=dataloader.drop_last,
        _non_blocking=request.non_blocking,
        slice_fn=slice_fn,
        torch_device_mesh=request.mesh,
        **batching,
        **request.settings(),
    )
    loader.device = request.device
    loader.set_even_batches(request.even_batches)
    if request.rng_types is not None:
        loader.set_rng_types(request.rng_types)
    return loader
