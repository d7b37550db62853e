"""Arguments that prepare_data_loader accepts and refuses, and names and defaults that scripts rely on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from accel_data import (
    BatchSamplerShard,
    DataLoaderConfiguration,
    IterableDatasetShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_data.layout import data_ranks
from accel_state.errors import ConfigurationError


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_defaults_that_the_reference_does_not_have() -> None:
    """tests/test_reference_api.py compares all others."""
    ours = DataLoaderConfiguration()
    assert (ours.already_sharded, ours.elastic, ours.logical_shards) == (False, False, 8)
    defaults = {name: one.default for name, one in inspect.signature(prepare_data_loader).parameters.items()}
    assert [defaults[name] for name in ("already_sharded", "batches_per_step", "elastic", "logical_shards")] == [
        *(False, 1, False, 8)
    ]


def test_a_prepared_loader_is_not_prepared_again() -> None:
    loader = prepare_data_loader(DataLoader(range(4)))
    assert prepare_data_loader(loader) is loader


def test_contradictions_are_named() -> None:
    with pytest.raises(ConfigurationError, match="of 3 cannot.*among 2 processes.*of 2 or 4"):
        prepare_data_loader(DataLoader(range(9), batch_size=3), num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ConfigurationError, match="process_index=5.*of 2 processes"):
        prepare_data_loader(DataLoader(range(9)), num_processes=2, process_index=5)
    with pytest.raises(ConfigurationError, match="dispatch_batches=True.*rank 0 only"):
        prepare_data_loader(DataLoader(Stream()), dispatch_batches=True, already_sharded=True)
    with pytest.raises(ConfigurationError, match="it cannot serve rank 1 of 2"):
        prepare_data_loader(DataLoader(Stream()), num_processes=2, process_index=1, dispatch_batches=True)
    sampler = DistributedSampler(range(9), num_replicas=4, rank=1)
    with pytest.raises(ConfigurationError, match="DistributedSampler.*rank 1 of 4.*rank 0 of 2"):
        prepare_data_loader(DataLoader(range(9), sampler=sampler), num_processes=2, process_index=0)
    with pytest.raises(ConfigurationError, match="num_batches=-1 must be at least 0"):
        skip_first_batches(DataLoader(range(3)), -1)
    with pytest.raises(ConfigurationError, match="total_batch_size is not defined"):
        _ = prepare_data_loader(DataLoader(range(3), batch_sampler=[[0], [1, 2]])).total_batch_size
    with pytest.raises(ConfigurationError, match="cannot be replaced"):
        prepare_data_loader(DataLoader(range(3), batch_sampler=[[0], [1, 2]])).set_sampler([1])


class Mesh:
    """The part of a torch DeviceMesh that is asked for."""

    mesh_dim_names = ("dp_replicate", "dp_shard", "tp")

    def size(self, axis: int) -> int:
        return (2, 3, 4)[axis]

    def get_local_rank(self, axis: int) -> int:
        return (1, 2, 3)[axis]


def test_ranks_that_share_a_model_share_their_data() -> None:
    assert data_ranks(None, None, Mesh()) == (6, 5)
    loader = prepare_data_loader(DataLoader(range(12), batch_size=2), torch_device_mesh=Mesh())
    assert [batch.tolist() for batch in loader] == [[10, 11]]


def test_batches_are_moved_only_if_asked() -> None:
    meta = torch.device("meta")
    plain = DataLoader(torch.arange(4), batch_size=2)
    assert {batch.device.type for batch in prepare_data_loader(plain, device=meta, put_on_device=True)} == {"meta"}
    assert {batch.device.type for batch in prepare_data_loader(plain, device=meta)} == {"cpu"}
    assert {batch.device.type for batch in prepare_data_loader(plain, put_on_device=True)} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_processes", "x"), ("num_processes", 1.5), ("process_index", []), ("split_batches", "false")),
        *(("even_batches", None), ("dispatch_batches", "x"), ("put_on_device", "cpu"), ("use_seedable_sampler", 2)),
        *(("rng_types", "torch"), ("rng_types", 5), ("elastic", "x"), ("already_sharded", [])),
    ],
)
def test_arguments_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        prepare_data_loader(DataLoader(range(8), batch_size=2), **{"num_processes": 1, "process_index": 0, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["x", float("nan"), 1.5, []])
def test_a_seed_that_is_none(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="data_seed"):
        SeedableRandomSampler(range(3), data_seed=seed)


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("batch_size", "x"), ("drop_last", "x"), ("split_batches", None)]
)
def test_arguments_of_shards(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        IterableDatasetShard([1, 2], **{name: value})  # type: ignore[arg-type]
    if name == "split_batches":
        with pytest.raises(ConfigurationError, match=name):
            BatchSamplerShard(BatchSampler(range(4), 2, False), split_batches=value)  # type: ignore[arg-type]
