"""Ranks whose samplers or data sets differ: samples would be lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from accel_data import prepare_data_loader
from accel_data.rank_comparison import compare_between_ranks
from accel_state.errors import ConfigurationError
from accel_state.state import PartialState
from accel_state.testing import run_world


class Shuffled(Sampler[int]):
    """A user's sampler, which draws from torch's global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class Buckets(Shuffled):
    """Batches of such an order."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length).tolist()
        return iter([order[begin : begin + 4] for begin in range(0, self.length, 4)])

    def __len__(self) -> int:
        return -(-self.length // 4)


def loaders(workers: int) -> dict[str, DataLoader[Any]]:
    data, settings = range(22), {"num_workers": workers}
    return {
        "sampler": DataLoader(data, batch_size=4, sampler=Shuffled(22), **settings),
        "batch sampler": DataLoader(data, batch_sampler=Buckets(22), **settings),
        "items": DataLoader(data, batch_size=None, sampler=Shuffled(22), **settings),
        "wrapped": DataLoader(data, batch_sampler=BatchSampler(Shuffled(22), 4, True), **settings),
    }


def orders() -> dict[str, Any]:
    rank = PartialState().process_index
    found: dict[str, Any] = {}
    for workers in (0, 1):
        for loader in loaders(workers).values():
            torch.manual_seed(rank)
            with pytest.raises(ConfigurationError, match="between ranks 0 and 1"):
                next(iter(prepare_data_loader(loader)))
    for name, loader in loaders(0).items():
        torch.manual_seed(rank)
        read = [
            torch.as_tensor(batch).reshape(-1)
            for batch in prepare_data_loader(loader, rng_types=["generator", "torch"])
        ]
        found[name] = torch.cat(read).tolist()
    torch.manual_seed(rank)
    assert len(list(prepare_data_loader(loaders(0)["sampler"], already_sharded=True))) == 6
    return found


def test_samplers_that_differ_between_ranks_are_refused() -> None:
    """All samples of 22 are read when the generator is copied from rank 0 (16 where the last round is dropped)."""
    ranks = run_world(orders, 2)
    for name, count in {"sampler": 22, "batch sampler": 22, "items": 22, "wrapped": 16}.items():
        assert len({*ranks[0][name], *ranks[1][name]}) == count, name


class Part(Dataset[int]):
    """Samples of this rank only."""

    def __init__(self, length: int, fingerprint: str) -> None:
        self.length, self._fingerprint = length, fingerprint

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings_about_parts() -> list[list[str]]:
    state, found = PartialState(), []
    rank = state.process_index
    kinds = {
        "length": Part(12 - 2 * rank, ""),
        "fingerprint": Part(11, f"f{rank}"),
        "equal": Part(11, "f"),
        "declared": Part(12 - 2 * rank, ""),
    }
    for name, data in kinds.items():
        logger = logging.getLogger(compare_between_ranks.__module__)
        records = Records()
        logger.addHandler(records)
        loader = prepare_data_loader(DataLoader(data, batch_size=2), already_sharded=name == "declared")
        for turn in range(2):  # one rank after the other, without waiting
            if turn == rank:
                iterator = iter(loader) if name != "declared" else None
                if iterator is not None:
                    next(iterator)
            state.wait_for_everyone()
        logger.removeHandler(records)
        found.append(records.messages)
    return found


def test_data_sets_that_differ_between_ranks_are_reported_by_the_later_rank() -> None:
    first, second = run_world(warnings_about_parts, 2)
    assert first == [[], [], [], []]
    (length,), (fingerprint,), equal, declared = second
    assert "10 samples on rank 1 and 12 on rank 0" in length and "already_sharded=True" in length
    assert "f1 on rank 1 and f0 on rank 0" in fingerprint
    assert equal == declared == []


class Pipeline(IterableDataset[int]):
    """Like a pipeline of webdataset: a list of stages."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = [range(3), *stages]

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def split_by_node(source: Any) -> Any:
    """The name of webdataset's stage."""
    return source


def test_a_pipeline_that_is_split_by_node_is_not_sharded_again() -> None:
    for stages, expected in (([split_by_node], [0, 1, 2]), ([], [0, 2])):
        loader = prepare_data_loader(DataLoader(Pipeline(*stages), batch_size=1), None, 2, 0)
        if stages:
            assert loader.layout.synchronize_steps
        else:
            assert torch.cat(list(loader)).tolist() == expected
