"""Preparing any torch loader for this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from accel_state import get_logger
from accel_state.arguments import check_flag, check_rank
from accel_state.context import is_initialized
from accel_state.devices.registry import of as device_of
from accel_state.enums import RNGType
from accel_state.errors import ConfigurationError, check_type
from accel_state.state import PartialState

from ._torch_compat import set_attribute
from .adapter import loader_settings, warn_about_custom_iter
from .batch_shard import sampler_arguments
from .dispatcher import DataLoaderDispatcher
from .elastic import ElasticPlan
from .elastic_loader import prepare_elastic
from .iterable_shard import (
    CountingCollate,
    IterableDatasetShard,
    StatefulIterableDatasetShard,
    can_shard_at_source,
    is_already_split,
    shard_at_source,
)
from .layout import LoaderLayout, check_node_sources, data_ranks, distributed_sampler_layout
from .loader import PreparedLoader
from .other_loaders import as_torch_loader, is_other_loader, node_sources
from .rank_comparison import compare_between_ranks
from .samplers import SeedableRandomSampler, get_sampler, innermost_sampler, is_plain_batch_sampler
from .shard import DataLoaderShard
from .shard_math import per_process_batch_size

logger: Final = get_logger(__name__)

T = TypeVar("T")


def prepare_data_loader(
    dataloader: DataLoader[T],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    already_sharded: bool = False,
    batches_per_step: int = 1,
    elastic: bool = False,
    logical_shards: int = 8,
) -> PreparedLoader[T]:
    """Return a loader with the same settings that reads this process's shard of the data.
    Map-style data is sharded by its sampler. Each rank reads its own sources of an iterable data set that has
    ``shard(num_shards, index)`` and at least as many ``num_shards`` as there are processes. For other iterable data,
    rank 0 reads and sends batches (``dispatch_batches``), or each rank reads the whole stream and keeps its part.

    Every prepared loader knows its last batch, counts its epochs, and has ``state_dict`` and ``load_state_dict`` that
    resume it exactly.

    Args:
        dataloader: any torch loader; or one of another library that yields batches, such as webdataset's WebLoader or
            torchdata.nodes.Loader, which is read as an iterable data set with ``batch_size=None``. A prepared loader is
            returned unchanged.
        device: device to move batches to, with ``put_on_device``; None means that of this process.
        num_processes: number of ranks that share the data; None means that of the run. A mesh overrides both.
        process_index: index of this rank among them; None means that of the run.
        split_batches: the loader's batch size, in samples, is that of all ranks together.
        put_on_device: move batches to the device.
        rng_types: generators to copy from rank 0 at the start of an iteration: "generator" (that of the sampler; the
            default), "torch", "cuda", "numpy", "python", ...
        dispatch_batches: read on rank 0 only and send batches to the other ranks. None does so for iterable data that
            cannot be sharded at the source, if ``put_on_device`` is set.
        even_batches: give every rank the same number of full batches, by repeating samples at the end of an epoch.
        slice_fn_for_dispatch: ``slice_fn(batch, slice, process_index=, num_processes=)`` cuts out a rank's batch when
            dispatching.
        use_seedable_sampler: make the order of a shuffled loader depend on ``data_seed`` and the epoch only.
        data_seed: that seed; None uses rank 0's ``torch.initial_seed()``.
        non_blocking: copy batches to the device asynchronously.
        use_stateful_dataloader: build on torchdata's StatefulDataLoader.
        torch_device_mesh: device mesh of the ranks; those that differ only along tp, cp, sp or pp get the same data.
        already_sharded: this loader already reads only the rank's part of the data. This is detected for a loader or
            data set with an attribute ``already_sharded = True``, and for a
            :class:`torch.utils.data.DistributedSampler`.
        batches_per_step: how many of the loader's batches this process gets as one, for a process that computes on
            several devices. With ``split_batches`` the loader's batches are such batches already.
        elastic: steps that do not depend on the number of processes, as in :class:`DataLoaderConfiguration`.
        logical_shards: with ``elastic``, the number of parts that each global batch is computed in.

    On a device that compiles for every shape of a batch (XLA), ``even_batches`` completes the last batch in a single
    process too.

    Returns:
        A loader whose batches, and whose length, are those of this process.

    Raises:
        ConfigurationError: the arguments contradict each other.
        MissingDependencyError: ``use_stateful_dataloader`` without torchdata.

    Examples:
        >>> second = prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)
        >>> [batch.tolist() for (batch,) in second]
        [[2, 3], [6, 7]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    flags = {"split_batches": split_batches, "put_on_device": put_on_device, "even_batches": even_batches}
    flags |= {"use_seedable_sampler": use_seedable_sampler, "non_blocking": non_blocking, "elastic": elastic}
    flags |= {"use_stateful_dataloader": use_stateful_dataloader, "already_sharded": already_sharded}
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            check_flag(name, flag)
    check_flag("dispatch_batches", dispatch_batches, or_none=True)
    if rng_types is not None and not isinstance(rng_types, (list, tuple)):
        raise ConfigurationError(f"rng_types={rng_types!r} must be a list, such as ['torch', 'generator'].")
    if torch_device_mesh is not None or num_processes is None or process_index is None:
        num_processes, process_index = data_ranks(num_processes, process_index, torch_device_mesh)
    elif not is_initialized():
        PartialState()  # for loaders that log
    check_rank(num_processes, process_index)
    if not hasattr(dataloader, "dataset"):
        if not is_other_loader(dataloader):
            check_type(dataloader, DataLoader, "prepare_data_loader", "Pass a DataLoader of torch.")
        check_node_sources(node_sources(dataloader), num_processes, process_index, already_sharded)
        dataloader = as_torch_loader(dataloader)
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        warn_about_custom_iter(dataloader)
    if elastic and data_seed is None:
        data_seed = PartialState().collectives.broadcast_object(torch.initial_seed())
    if use_seedable_sampler or elastic:
        dataloader = _with_seedable_sampler(dataloader, data_seed)
    if put_on_device and device is None:
        device = PartialState().device
    declared = already_sharded or getattr(dataloader, "already_sharded", False) or is_already_split(dataloader.dataset)
    if num_processes > 1 and not declared:
        sampler = get_sampler(dataloader)
        if not isinstance(sampler, DistributedSampler):
            compare_between_ranks(dataloader.dataset, sampler, num_processes)
    if elastic:
        _check_elastic(dataloader, logical_shards, declared, use_stateful_dataloader, batches_per_step)
        batches: Any = dataloader
        if dataloader.batch_size is None and is_plain_batch_sampler(dataloader.batch_sampler):
            batches = dataloader.batch_sampler
        size, drop_last = batches.batch_size, batches.drop_last
        plan = ElasticPlan(
            size, logical_shards, num_processes, process_index, drop_last, even_batches, int(data_seed or 0)
        )
        if dispatch_batches is None:
            dispatch_batches = put_on_device and num_processes > 1 and isinstance(dataloader.dataset, IterableDataset)
        target = device if put_on_device else None
        return prepare_elastic(dataloader, plan, dispatch_batches, target, non_blocking, torch_device_mesh)
    if batches_per_step > 1:
        dataloader = _with_joined_batches(dataloader, batches_per_step, split_batches)
    iterable = isinstance(dataloader.dataset, IterableDataset)
    builder = _LoaderBuilder(
        dataloader,
        device if put_on_device else None,
        num_processes,
        process_index,
        split_batches,
        even_batches,
        rng_types,
        non_blocking,
        use_stateful_dataloader,
        torch_device_mesh,
        declared,
        iterable,
        put_on_device and getattr(device_of(device), "fixed_shapes", False),
    )
    if dispatch_batches is None:
        is_read_by_all = not iterable or num_processes == 1 or declared
        dispatch_batches = (
            put_on_device and not is_read_by_all and not can_shard_at_source(dataloader.dataset, num_processes)
        )
    elif dispatch_batches and declared:
        raise ConfigurationError(
            "dispatch_batches=True reads on rank 0 only, but the loader is declared to read a part of the data on each "
            "rank (already_sharded). Remove one of them."
        )
    if split_batches and dataloader.batch_size is not None:
        per_process_batch_size(dataloader.batch_size, num_processes)
    if dispatch_batches:
        return builder.dispatcher(slice_fn_for_dispatch)
    return builder.iterable_shard() if iterable else builder.map_style_shard()


def _check_elastic(
    dataloader: DataLoader[Any], logical_shards: int, declared: bool, stateful: bool, batches_per_step: int
) -> None:
    if not isinstance(logical_shards, int) or logical_shards < 1:
        raise ConfigurationError(f"logical_shards={logical_shards!r} must be a positive integer")
    if stateful:
        raise ConfigurationError(
            "elastic=True and use_stateful_dataloader=True cannot be combined: an elastic loader saves its position, "
            "and the state of a data set that has state_dict, itself. Remove use_stateful_dataloader."
        )
    if declared:
        raise ConfigurationError(
            "elastic=True divides the samples among any number of processes, but the loader is declared to read a part "
            "of the data on each rank (already_sharded). Let every rank have all of the data."
        )
    if batches_per_step > 1:
        raise ConfigurationError(
            f"elastic=True needs one device per process, but each process computes on {batches_per_step} parts of the "
            "devices. Remove elastic."
        )


def _with_joined_batches(dataloader: DataLoader[Any], count: int, split_batches: bool) -> DataLoader[Any]:
    """Return a copy whose batches are ``count`` times as large; with ``split_batches`` the loader itself."""
    batch_sampler: Any = dataloader.batch_sampler
    is_iterable = isinstance(dataloader.dataset, IterableDataset)
    size = dataloader.batch_size
    if split_batches and size is not None:
        per_process_batch_size(size, count)
    if split_batches:
        return dataloader
    if size is None or not (is_iterable or is_plain_batch_sampler(batch_sampler)):
        raise ConfigurationError(
            f"each step takes {count} batches of this loader, one for each part of the devices, but "
            f"{type(batch_sampler).__name__ if size is None and batch_sampler is not None else 'its data set'} makes "
            "batches of its own. Let it make the batches of all devices together, and set "
            "DataLoaderConfiguration(split_batches=True)."
        )
    copied = copy.copy(dataloader)
    if is_iterable:
        set_attribute(copied, "batch_size", size * count)
    else:
        batch_sampler = copy.copy(batch_sampler)
        batch_sampler.batch_size = size * count
        set_attribute(copied, "batch_sampler", batch_sampler)
        set_attribute(copied, "batch_size", size * count)
    return copied


def _with_seedable_sampler(dataloader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """Return a copy whose random sampler is replaced by a SeedableRandomSampler; the loader itself if it has none."""
    if isinstance(dataloader.dataset, IterableDataset):
        return dataloader
    batch_sampler: Any = dataloader.batch_sampler
    sampler: Any = dataloader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    kind = type(sampler)
    is_torchdata_random = kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata.")
    if kind is not RandomSampler and not is_torchdata_random:
        return dataloader
    if data_seed is None:
        data_seed = PartialState().collectives.broadcast_object(torch.initial_seed())
    data, count = sampler.data_source, sampler.num_samples
    seedable = SeedableRandomSampler(
        data, sampler.replacement, None if count == len(data) else count, data_seed=data_seed
    )
    copied = copy.copy(dataloader)
    if batch_sampler is None:
        set_attribute(copied, "sampler", seedable)
    else:
        batch_sampler = copy.copy(batch_sampler)
        batch_sampler.sampler = seedable
        set_attribute(copied, "batch_sampler", batch_sampler)
    return copied


@dataclass
class _LoaderBuilder:
    """Builds a prepared loader from the resolved arguments of :func:`prepare_data_loader`."""

    dataloader: DataLoader[Any]
    device: torch.device | None
    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    rng_types: Sequence[str | RNGType] | None
    non_blocking: bool
    stateful: bool
    mesh: Any
    declared_sharded: bool
    iterable: bool
    fixed_shapes: bool

    @property
    def batching(self) -> dict[str, Any]:
        return {"batch_size": self.dataloader.batch_size, "drop_last": self.dataloader.drop_last}

    def map_style_shard(self) -> DataLoaderShard:
        """Return a loader in which each rank reads its own samples."""
        dataloader, size, rank = self.dataloader, self.num_processes, self.process_index
        sampler = innermost_sampler(dataloader.batch_sampler or dataloader.sampler)
        if isinstance(sampler, DistributedSampler):
            layout = distributed_sampler_layout(sampler, dataloader.batch_size, dataloader.drop_last, size, rank)
        elif self.declared_sharded:
            layout = self._separate_sources()
        else:
            even = self.even_batches and (size > 1 or self.fixed_shapes)
            if self.fixed_shapes:
                self._report_last_batch()
            arguments = sampler_arguments(dataloader, size, rank, self.split_batches, even)
            return self._build_shard(self.dataloader.dataset, LoaderLayout(size, rank), **arguments)
        return self._build_shard(self.dataloader.dataset, layout, **sampler_arguments(dataloader))

    def iterable_shard(self) -> DataLoaderShard:
        """Return a loader in which each rank reads its own part of a stream."""
        dataset = self.dataloader.dataset
        if self.num_processes == 1 and not self._completes_stream:
            return self._build_shard(dataset, LoaderLayout(), **self.batching)
        if not self.declared_sharded:
            if not can_shard_at_source(dataset, self.num_processes):
                return self._stream_shard()
            dataset = shard_at_source(dataset, self.num_processes, self.process_index)
        batching = self.batching
        if batching["batch_size"] is not None and self.split_batches:
            batching["batch_size"] = per_process_batch_size(batching["batch_size"], self.num_processes)
        return self._build_shard(dataset, self._separate_sources(), **batching)

    @property
    def _completes_stream(self) -> bool:
        """True if the last batch of an iterable data set must be completed although one process reads it."""
        batched = self.dataloader.batch_size is not None
        return self.fixed_shapes and self.even_batches and batched and not (self.dataloader.drop_last or self.stateful)

    def _report_last_batch(self) -> None:
        """Tell the user what happens to a last batch that is short, on a device that compiles for each shape."""
        size, sampler = self.dataloader.batch_size, getattr(self.dataloader.batch_sampler, "sampler", None)
        rest = len(sampler) % size if size is not None and isinstance(sampler, Sized) else 0
        if not rest or self.dataloader.drop_last:
            return
        done, instead = (
            (
                "it is completed with samples from the start",
                "gather_for_metrics leaves these out; drop_last=True drops it",
            )
            if self.even_batches
            else ("it is not completed", "even_batches=True completes it, drop_last=True drops it")
        )
        logger.warning(
            "The last batch has %d of %d samples, and %s compiles for every shape: %s. %s.",
            *(rest, size, self.device, done, instead),
        )

    def _separate_sources(self) -> LoaderLayout:
        """Layout of ranks that read separate sources."""
        several = self.num_processes > 1
        return LoaderLayout(
            self.num_processes, self.process_index, ragged=several, synchronize_steps=several, elastic=not several
        )

    def _stream_shard(self) -> DataLoaderShard:
        """Return a loader in which each rank reads the whole stream and keeps its part."""
        dataloader = self.dataloader
        dataset: Any = dataloader.dataset
        batched = dataloader.batch_size is not None
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        shard_class = StatefulIterableDatasetShard if has_state else IterableDatasetShard
        shard = shard_class(
            dataset,
            batch_size=dataloader.batch_size or 1,
            drop_last=dataloader.drop_last,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=self.split_batches and batched,
        )
        shard.even_batches = self.even_batches
        shard.marks = True
        # Each worker completes the end of its own stream, so padding may appear before the last step.
        uneven = not self.even_batches or dataloader.num_workers > 1 or not batched
        layout = LoaderLayout(self.num_processes, self.process_index, ragged=uneven)
        collate = CountingCollate(dataloader.collate_fn, batched=batched)
        batch_size = shard.local_batch_size if batched else None
        loader = self._build_shard(shard, layout, batch_size=batch_size, collate_fn=collate)
        if isinstance(getattr(dataset, "generator", None), torch.Generator):
            loader.synchronized_generator = dataset.generator
        return loader

    def _build_shard(self, dataset: Any, layout: LoaderLayout, **kwargs: Any) -> DataLoaderShard:
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
            **{**loader_settings(self.dataloader, self.stateful), **kwargs},
        )
        loader.layout = layout
        return loader

    def dispatcher(self, slice_fn: Callable[..., Any] | None) -> DataLoaderDispatcher:
        """Return a loader in which rank 0 reads and sends the batches."""
        state = PartialState()
        if data_ranks(None, None, self.mesh) != (self.num_processes, self.process_index):
            raise ConfigurationError(
                f"dispatching sends batches between the processes of the run, in which this is rank "
                f"{state.process_index} of {state.num_processes}; it cannot serve rank {self.process_index} of "
                f"{self.num_processes}. Remove num_processes and process_index, or use dispatch_batches=False."
            )
        loader = DataLoaderDispatcher(
            self.dataloader.dataset,
            split_batches=self.split_batches,
            use_stateful_dataloader=self.stateful,
            _drop_last=self.dataloader.drop_last,
            _non_blocking=self.non_blocking,
            slice_fn=slice_fn,
            torch_device_mesh=self.mesh,
            **(self.batching if self.iterable else sampler_arguments(self.dataloader)),
            **loader_settings(self.dataloader, self.stateful),
        )
        loader.device = self.device
        loader.set_even_batches(self.even_batches)
        if self.rng_types is not None:
            loader.set_rng_types(self.rng_types)
        return loader
