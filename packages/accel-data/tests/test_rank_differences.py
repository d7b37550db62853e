"""Ranks whose samplers or data sets differ: samples would be lost in silence."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
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

    def __init__(self, length: int, rank: int = 0) -> None:
        self.length, self.rank, self._fingerprint = length, rank, f"f{rank}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 2 * index + self.rank


class Unsized(Part):
    """The length is not known."""

    def __len__(self) -> int:
        raise NotImplementedError


class RankStream(IterableDataset[int]):
    """The samples of this rank, with their number."""

    def __len__(self) -> int:
        return 12 - 2 * dist.get_rank()

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 22, dist.get_world_size()))


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def loaders_that_differ(rank: int) -> dict[str, Any]:
    """Loaders by what is said of them; nothing of those of ""."""

    def seeded(seed: int) -> SeedableRandomSampler:
        return SeedableRandomSampler(range(22), data_seed=seed)

    return {
        "10 samples on rank 1 and 12 on rank 0": DataLoader(Part(12 - 2 * rank)),
        "11 samples on rank 1 and 12 on rank 0": DataLoader(Part(12 - rank), sampler=seeded(rank)),
        "the seed 1 on rank 1 and 0 on rank 0": DataLoader(range(22), sampler=seeded(rank)),
        "has indices with the checksum": DataLoader(Subset(Subset(range(44), range(rank, 44, 2)), range(11))),
        # Nothing else is compared.
        "": (
            DataLoader(range(22), sampler=seeded(5)),
            DataLoader(Part(11, rank)),
            DataLoader(Subset(range(22), torch.arange(0, 22, 2))),
            DataLoader(TensorDataset(torch.arange(22)[rank::2])),
            DataLoader(Unsized(12 - rank), sampler=range(11)),
            DataLoader(RankStream()),
        ),
    }


def warnings_about_data() -> dict[str, list[str]]:
    state, found = PartialState(), {}
    logger = logging.getLogger(compare_between_ranks.__module__)
    for said, loaders in loaders_that_differ(state.process_index).items():
        records = Records()
        logger.addHandler(records)
        for turn in range(2):  # one rank after the other, without waiting
            if turn == state.process_index:
                for loader in loaders if isinstance(loaders, tuple) else (loaders,):
                    prepare_data_loader(loader)
                    prepare_data_loader(loader, num_processes=1, process_index=0)
            state.wait_for_everyone()
        prepare_data_loader(DataLoader(Part(12 - 2 * state.process_index)), already_sharded=True)
        logger.removeHandler(records)
        found[said] = records.messages
    return found


def test_lengths_and_seeds_that_differ_between_ranks_are_reported_by_the_later_rank() -> None:
    first, second = run_world(warnings_about_data, 2)
    for said, messages in second.items():
        assert first[said] == []
        if not said:
            assert messages == []
            continue
        (message,) = messages
        assert said in message and "already_sharded=True" in message


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
        shuffled = DataLoader(range(22), shuffle=True, generator=torch.Generator().manual_seed(seed))
        list(prepare_data_loader(shuffled, rng_types=[]))  # ranks do not wait for one another
        PartialState().wait_for_everyone()
        found.append(records.messages[:])
    return found


def test_orders_that_differ_although_torch_has_the_sampler() -> None:
    first, second = run_world(other_orders, 2)
    assert first[0] == second[0] == []
    # With rng_types=[], one rank is later, or each hears of the other.
    assert {"differs between ranks" in message for message in (*first[1], *second[1])} == {True}


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
