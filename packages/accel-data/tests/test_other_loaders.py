"""Loaders of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data import BatchSamplerShard, prepare_data_loader
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


@pytest.mark.parametrize("wrong", [[1, 2], iter([1]), "text", Split(), 5])
def test_what_is_no_loader_is_refused(wrong: Any) -> None:
    with pytest.raises((ConfigurationError, TypeError), match=type(wrong).__name__):
        prepare_data_loader(wrong)


def test_a_batch_sampler_that_is_created_again_says_what_to_write() -> None:
    loader = prepare_data_loader(DataLoader(range(8), batch_size=2), None, 2, 0)
    sampler: Any = loader.batch_sampler
    assert isinstance(sampler, BatchSamplerShard) and isinstance(sampler, BatchSampler)
    with pytest.raises(ConfigurationError, match="use_distributed_sampler=False"):
        type(sampler)(sampler.sampler, batch_size=2, drop_last=False)


def test_a_class_is_refused() -> None:
    with pytest.raises((ConfigurationError, TypeError), match="range"):
        prepare_data_loader(range)
