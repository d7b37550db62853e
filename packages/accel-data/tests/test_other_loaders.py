"""Loaders of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from accel_data import prepare_data_loader
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

nodes = pytest.importorskip("torchdata.nodes", reason="needs torchdata: pip install 'accel-data[stateful]'")


def node_loader(length: int = 20) -> Any:
    batches = nodes.Batcher(nodes.SamplerWrapper(range(length)), 3, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, torch.tensor))


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


class Split(IterableDataset[int]):
    already_sharded = True

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class WebLoader(IterableDataset[Any]):
    """Like webdataset's: a data set to torch, whose first stage is a DataLoader."""

    def __init__(self) -> None:
        self.pipeline = [DataLoader(Split(), batch_size=2)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


def test_nodes_are_read_in_every_epoch() -> None:
    loader = prepare_data_loader(node_loader())
    for epoch in range(2):
        assert loader.iteration == epoch
        ends = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        assert flat(batch for batch, _ in ends) == list(range(20))
        assert [end for _, end in ends] == [False] * 6 + [True]


@pytest.mark.parametrize("stateful", [False, True])
def test_nodes_resume_exactly(stateful: bool) -> None:
    loader = prepare_data_loader(node_loader(), use_stateful_dataloader=stateful)
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    again = prepare_data_loader(node_loader(), use_stateful_dataloader=stateful)
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    assert flat(seen + rest) == list(range(20))
    assert flat(batch.tolist() for batch in again) == list(range(20))


def parts() -> list[list[Any]]:
    found = []
    for dispatch in (False, True):
        loader = prepare_data_loader(node_loader(18), dispatch_batches=dispatch)
        found.append([batch.tolist() for batch in loader if loader.real_samples != 0])
    found.append([batch.tolist() for batch in prepare_data_loader(WebLoader())])
    return found


def test_ranks_share_the_batches_of_nodes_and_keep_what_is_sharded() -> None:
    first, second = run_world(parts, 2)
    for one, other in zip(first[:2], second[:2], strict=True):
        assert sorted(flat(one + other)) == list(range(18)) and len(one) == len(other) == 3
    assert first[2] == second[2] == [[0, 1], [2, 3], [4, 5]]


def over(*samplers: Any) -> Any:
    """A loader of nodes over samplers, whose samples they take in turn."""
    sources = {str(number): nodes.SamplerWrapper(each) for number, each in enumerate(samplers)}
    weights = dict.fromkeys(sources, 1.0)
    root = sources["0"]
    if len(sources) > 1:
        root = nodes.MultiNodeWeightedSampler(sources, weights, nodes.StopCriteria.ALL_DATASETS_EXHAUSTED)
    batches = nodes.Batcher(nodes.Prefetcher(root, 1), 3, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, torch.tensor))


def split() -> list[list[int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = range(24)
    loaders = [
        over(DistributedSampler(data, shuffle=False)),
        over(BatchSampler(DistributedSampler(data), 1, False)),
        over(DistributedSampler(data), DistributedSampler(data)),
        nodes.Loader(nodes.IterableWrapper(DataLoader(data, 3, sampler=DistributedSampler(data)))),
        over(data),
    ]
    assert next(iter(loaders[0])).tolist() == [rank, rank + size, rank + 2 * size]  # used before it is prepared
    found = [torch.cat([each.reshape(-1) for each in prepare_data_loader(loader)]).tolist() for loader in loaders]
    for wrong in (DistributedSampler(data, size, (rank + 1) % size), DistributedSampler(data, size + 1, rank)):
        with pytest.raises(ConfigurationError, match=f"rank {wrong.rank} of {wrong.num_replicas}, and this process is"):
            prepare_data_loader(over(wrong))
    mixed = over(DistributedSampler(data), data)
    with pytest.raises(ConfigurationError, match="part through DistributedSampler, and all of range"):
        prepare_data_loader(mixed)
    assert len(list(prepare_data_loader(mixed, already_sharded=True))) == 8 * (1 + size) // size
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])  # the same on more ranks
def test_nodes_over_a_distributed_sampler_are_not_sharded_again(ranks: int) -> None:
    found = run_world(split, ranks)
    for number, times in enumerate((1, 1, 2, 1, 1)):
        assert sorted(flat(each[number] for each in found)) == sorted(list(range(24)) * times)


@pytest.mark.parametrize("wrong", [[1, 2], iter([1]), "text", Split(), 5])
def test_what_is_no_loader_is_refused(wrong: Any) -> None:
    with pytest.raises((ConfigurationError, TypeError), match=type(wrong).__name__):
        prepare_data_loader(wrong)


def test_a_class_is_refused() -> None:
    with pytest.raises((ConfigurationError, TypeError), match="range"):
        prepare_data_loader(range)
