"""Ranks whose samplers or data sets differ: samples would be lost in silence."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accel_data import SeedableRandomSampler, prepare_data_loader
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


class PythonShuffled(Shuffled):
    """Draws from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.length), self.length))


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
    random.seed(rank)
    for uncopied in (
        DataLoader(range(22), batch_size=4, sampler=PythonShuffled(22)),
        DataLoader(range(22), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)),
    ):
        with pytest.raises(ConfigurationError, match="between ranks 0 and 1"):
            next(iter(prepare_data_loader(uncopied, rng_types=["torch"])))
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


class Rows(Dataset[int]):
    """Samples in an attribute, as most data sets of users have them."""

    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.rows, self.rank, self.noise = rows, rank, [rank]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class OwnRows(Rows):
    """Samples of a part that ``__getitem__`` takes, whose beginning is no sequence that can be compared."""

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> Any:
        return self.row(index)

    def row(self, index: int) -> Any:
        return self.rows[index * 2 + self.rank]


class RankRows(OwnRows):
    """Samples of this rank, which ``__getitem__`` asks for."""

    def row(self, index: int) -> Any:
        return self.rows[index * dist.get_world_size() + dist.get_rank()]


class RankBatchRows(Rows):
    """Samples of this rank, read by the batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.rows[index * dist.get_world_size() + dist.get_rank()] for index in indices]


class OwnBatchRows(Rows):
    """Samples from an offset, read by the batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.rows[index * 2 + self.rank] for index in indices]


class Augmented(Rows):
    """All samples, with noise that differs between ranks."""

    def __init__(self, rows: Any, rank: int) -> None:
        super().__init__(rows, rank)
        # The first is not read; on rank 0 it is the same object as the last.
        self.level, self.seed, self.step = 5 + rank, 100 + rank, 5

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + torch.Generator().manual_seed(self.seed + self.step).initial_seed()


class Stream(IterableDataset[int]):
    """A stream of the samples in an attribute."""

    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.rows, self.rank = rows, rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


class RankStream(Stream):
    """A stream that reads the rank itself, in a method that __iter__ calls."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.own())

    def own(self) -> Any:
        return self.rows[dist.get_rank() :: dist.get_world_size()]


class Inner(RankStream):
    """Such a stream within another one."""


class Environment(Stream):
    """A stream that reads the launcher's variables."""

    def __iter__(self) -> Iterator[int]:
        return (row for row in self.rows if row % int(os.environ["WORLD_SIZE"]) == int(os.environ["RANK"]))


class RankBatches:
    """A loader of its own kind that reads the rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(22)[PartialState().process_index :: 2].split(2)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def parts(rank: int) -> dict[str, Any]:
    """Data sets by what is said of them; those of "" are the same on every rank."""
    own = list(range(22))[rank::2]
    return {
        "10 samples on rank 1 and 12 on rank 0": Part(12 - 2 * rank, ""),
        "f1 on rank 1 and f0 on rank 0": Part(11, f"f{rank}"),
        "Rows differs between ranks 1 and 0 (rows)": Rows(own),
        "Subset differs between ranks 1 and 0 (indices)": Subset(range(22), own),
        "TensorDataset differs between ranks 1 and 0 (tensors.0)": TensorDataset(torch.tensor(own)),
        "list differs between ranks 1 and 0 (elements)": [str(row) for row in own],
        "ConcatDataset differs between ranks 1 and 0 (datasets.0.rows)": ConcatDataset([Rows([{"x": n} for n in own])]),
        "Stream differs between ranks 1 and 0 (rows)": Stream(own),
        "Stream differs between ranks 1 and 0 (rank)": Stream(range(22), rank),
        "RankStream.__iter__ reads get_rank": RankStream(range(22)),
        "Environment.__iter__ reads RANK": Environment(range(22)),
        "Inner.__iter__ reads get_rank": ChainDataset([Inner(range(22))]),
        "RankRows.__getitem__ reads get_rank": Subset(RankRows(range(22)), range(11)),
        "RankBatchRows.__getitems__ reads get_rank": RankBatchRows(range(22)),
        "OwnBatchRows differs between ranks 1 and 0 (rank)": OwnBatchRows(range(22), rank),
        "OwnRows differs between ranks 1 and 0 (rank)": OwnRows(range(22), rank),
        "Subset differs between ranks 1 and 0 (dataset.rank)": Subset(OwnRows(range(22), rank), range(11)),
        "RankBatches.__iter__ reads process_index": RankBatches(),
        "": (
            Part(11, "f"),
            Rows(list(range(11)), rank),
            Augmented(range(11), rank),
            Stream(range(22)),
            torch.arange(22),
            [torch.zeros(2)] * 3,
        ),
    }


def warnings_about_parts() -> dict[str, list[str]]:
    state, found = PartialState(), {}
    logger = logging.getLogger(compare_between_ranks.__module__)
    for said, data in parts(state.process_index).items():
        records = Records()
        logger.addHandler(records)
        for turn in range(2):  # one rank after the other, without waiting
            if turn == state.process_index:
                for each in data if isinstance(data, tuple) else (data,):
                    prepare_data_loader(each if isinstance(each, RankBatches) else DataLoader(each, batch_size=2))
                    if not isinstance(each, RankBatches):
                        prepare_data_loader(DataLoader(each, batch_size=2), num_processes=1, process_index=0)
            state.wait_for_everyone()
        prepare_data_loader(DataLoader(Part(12 - 2 * state.process_index, ""), batch_size=2), already_sharded=True)
        logger.removeHandler(records)
        found[said] = records.messages
    return found


def test_data_sets_that_differ_between_ranks_are_reported_by_the_later_rank() -> None:
    first, second = run_world(warnings_about_parts, 2)
    for said, messages in second.items():
        if not said:
            assert messages == first[said] == []
            continue
        is_seen = "__" in said  # each rank sees that a method reads the rank
        reporter = first[said] if is_seen else messages
        (message,) = reporter
        assert said in message and "already_sharded=True" in message
        assert messages == [] if is_seen else first[said] == []


class AlmostShuffled(Shuffled):
    """The order differs between ranks after the first steps only."""

    def __iter__(self) -> Iterator[int]:
        yield from range(12)
        yield from (12 + torch.randperm(self.length - 12)).tolist()


class RandomLike(RandomSampler):
    """A subclass of torch's sampler that draws from the global generator, not from its own."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_samples).tolist()


class Reordered(BatchSampler):
    """Batches of another order than that of the sampler in it."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


def other_orders() -> list[list[str]]:
    rank, found = PartialState().process_index, []
    torch.manual_seed(rank)
    random.seed(rank)
    for sampler in (
        {"sampler": RandomLike(range(22)), "batch_size": 2},
        {"batch_sampler": Reordered(RandomSampler(range(22)), 2, False)},
        {"sampler": SubsetRandomSampler(torch.randperm(44)[:22].tolist()), "batch_size": 2},
        {"sampler": WeightedRandomSampler(torch.rand(22), 22), "batch_size": 2},
    ):
        with pytest.raises(ConfigurationError, match="between ranks 0 and 1"):
            next(iter(prepare_data_loader(DataLoader(range(44), **sampler))))
    logger = logging.getLogger(compare_between_ranks.__module__)
    records = Records()
    logger.addHandler(records)
    for seed in (0, rank):
        torch.manual_seed(seed)
        assert len(list(prepare_data_loader(DataLoader(range(22), sampler=AlmostShuffled(22), batch_size=2)))) == 6
        PartialState().wait_for_everyone()
        found.append(records.messages[:])
    loader = DataLoader(range(22), sampler=SeedableRandomSampler(range(22), data_seed=rank))
    for turn in range(2):
        if turn == rank:
            prepare_data_loader(loader)
        PartialState().wait_for_everyone()
    found.append(records.messages[len(found[-1]) :])
    records.messages.clear()
    for seed in (0, rank):
        shuffled = DataLoader(range(22), shuffle=True, generator=torch.Generator().manual_seed(seed))
        list(prepare_data_loader(shuffled, rng_types=[]))  # ranks do not wait for one another
        PartialState().wait_for_everyone()
        found.append(records.messages[:])
    return found


def test_orders_that_differ_although_torch_has_the_sampler_or_the_first_steps_agree() -> None:
    first, second = run_world(other_orders, 2)
    assert first[0] == second[0] == first[2] == []
    # One rank is later, or each hears of the other: the same words after the name of the rank.
    late, (seed,) = {message.partition("] ")[2] for message in (*first[1], *second[1])}, second[2]
    assert len(late) == 1 and all("differed later" in message and "rng_types" in message for message in late)
    assert "seed of the order" in seed
    assert first[3] == second[3] == []
    assert {"differs between ranks" in message for message in (*first[4], *second[4])} == {True}


class Pipeline(IterableDataset[int]):
    """Like a pipeline of webdataset: a list of stages."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = [range(3), *stages]

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def split_by_node(source: Any, group: Any = None) -> Any:
    """The name of webdataset's stage."""
    return source


@pytest.mark.parametrize(
    ("stages", "split"),
    [
        ([split_by_node], True),
        ([partial(split_by_node)], True),
        ([partial(partial(split_by_node), group=None)], True),
        ([partial(split_by_node, group="half of the ranks")], False),
        ([partial(sorted)], False),
        ([], False),
    ],
)
def test_a_pipeline_that_is_split_by_node_is_not_sharded_again(stages: list[Any], split: bool) -> None:
    loader = prepare_data_loader(DataLoader(Pipeline(*stages), batch_size=1), None, 2, 0)
    assert loader.layout.synchronize_steps is split
    if not split:
        assert torch.cat(list(loader)).tolist() == [0, 2]
