"""Elastic loaders: the same samples, order and random numbers on any number of processes and workers, also resumed.

The order is a pure function of seed, epoch and position, so that one process can play all ranks; that they agree where
rank 0 reads for all is tested with real ones in accel's test_elastic_training.py.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accel_data import ElasticLoader, LogicalShard, prepare_data_loader, skip_first_batches
from accel_data.elastic import (
    FOR_SAMPLE,
    ElasticPlan,
    ElasticSampler,
    ShardedItems,
    ShardRequest,
    seed_generators,
    shard_ranges,
)
from accel_state import ConfigurationError

Key = tuple[int, int, int]  # epoch, position, shard
EPOCHS = 2
KINDS = (
    *("sequential", "shuffle", "replacement", "weighted", "subset", "numpy", "joint", "buckets", "plain batches"),
    *("stream", "state", "sources", "shuffled stream"),
)


def sample(index: int) -> list[float]:
    """An id, and a number from each generator, as augmentation draws them."""
    return [float(index), torch.rand(()).item(), float(np.random.rand()), random.random()]


class Items(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        return sample(index)


class Joint(Items):
    """Samples that are read together."""

    def __getitem__(self, index: int) -> list[float]:
        raise AssertionError("samples are read together")

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [sample(index) for index in indices]


class Stream(IterableDataset):
    """A stream that would divide its samples among the workers."""

    def __init__(self, length: int, shuffled: bool = False) -> None:
        self.length = length
        self.shuffled = shuffled
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[float]]:
        order = list(range(self.length))
        if self.shuffled:
            random.shuffle(order)
        info = get_worker_info()
        if info is not None:
            order = order[info.id :: info.num_workers]
        return map(sample, [100 * self.epoch + index for index in order])


class Sources(Stream):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Sources:
        raise AssertionError("which sources a rank reads would depend on the number of ranks")


class Positioned(IterableDataset):
    """A stream that can be entered anywhere."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0
        self.loaded = False

    def __iter__(self) -> Iterator[list[float]]:
        if not self.loaded:
            self.position = 0
        self.loaded = False
        while self.position < self.length:
            self.position += 1
            yield sample(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.loaded = state["position"], True


class FromNumpy(Sampler):
    """A user's sampler, which draws from a global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class Buckets(FromNumpy):
    """A user's batch sampler, with batches of any size."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(self.length).tolist()
        while order:
            size = 1 + int(np.random.randint(7))
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return self.length


def collate(samples: list[list[float]]) -> torch.Tensor:
    """Draws numbers, too, as a collator that masks tokens does."""
    rows = torch.tensor(samples, dtype=torch.float64)
    return torch.cat([rows, torch.rand(len(rows), 1).double(), torch.full((len(rows), 1), np.random.rand())], dim=1)


@dataclass(frozen=True)
class Case:
    kind: str
    length: int
    batch_size: int
    logical_shards: int
    even: bool
    drop_last: bool
    before: int  # ranks
    after: int
    workers_before: int
    workers_after: int
    persistent: bool
    stop: int  # micro batches, over the epochs

    def loader(self, workers: int) -> DataLoader[Any]:
        settings: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
        if workers:
            settings["persistent_workers"] = self.persistent
        if self.kind in ("stream", "shuffled stream", "sources", "state"):
            kinds = {"sources": Sources, "state": Positioned}
            stream = (
                Stream(self.length, True)
                if self.kind == "shuffled stream"
                else kinds.get(self.kind, Stream)(self.length)
            )
            return DataLoader(stream, batch_size=self.batch_size, drop_last=self.drop_last, **settings)
        data = (Joint if self.kind == "joint" else Items)(self.length)
        if self.kind == "buckets":
            return DataLoader(data, batch_sampler=Buckets(self.length), **settings)
        samplers: dict[str, Any] = {
            "shuffle": lambda: RandomSampler(data),
            "joint": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(torch.initial_seed())),
            "replacement": lambda: RandomSampler(data, replacement=True, num_samples=self.length + 3),
            "weighted": lambda: WeightedRandomSampler([1.0 + i for i in range(self.length)], self.length),
            "subset": lambda: SubsetRandomSampler(
                range(self.length), generator=torch.Generator().manual_seed(torch.initial_seed())
            ),
            "numpy": lambda: FromNumpy(self.length),
            "plain batches": lambda: RandomSampler(data),
        }
        sampler = samplers.get(self.kind, lambda: None)()
        if self.kind == "plain batches":
            return DataLoader(data, batch_sampler=BatchSampler(sampler, self.batch_size, self.drop_last), **settings)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler, drop_last=self.drop_last, **settings)

    def prepared(self, world: int, workers: int, seed: int = 7) -> list[ElasticLoader]:
        """The loaders of all ranks; each process is seeded otherwise, as an unlucky script's are."""
        loaders = []
        for rank in range(world):
            torch.manual_seed(100 * world + rank)
            np.random.seed(rank)
            loaders.append(
                prepare_data_loader(
                    self.loader(workers),
                    num_processes=world,
                    process_index=rank,
                    even_batches=self.even,
                    elastic=True,
                    logical_shards=self.logical_shards,
                    data_seed=seed,
                )
            )
        return loaders


def case(number: int) -> Case:
    """A case that depends on its number only, so that a failure can be repeated."""
    dice = random.Random(number)
    workers = dice.random() < 0.15
    world = (1, 2, 3) if workers else (1, 2, 3, 4, 5, 6, 8)
    return Case(
        KINDS[number % len(KINDS)],
        dice.randint(1, 45),
        dice.randint(1, 12),
        dice.choice((1, 2, 3, 4, 6, 8)),
        dice.random() < 0.6,
        dice.random() < 0.3,
        dice.choice(world),
        dice.choice(world),
        dice.randint(0, 4) if workers else 0,
        dice.randint(0, 4) if workers else 0,
        dice.random() < 0.5,
        dice.randint(0, 25),
    )


@dataclass
class Record:
    samples: list[list[float]]
    drawn: tuple[float, float, float]


def steps(loader: ElasticLoader, epochs: int) -> Iterator[tuple[Key, LogicalShard, Record]]:
    """What a rank is handed until the last epoch: the shard, its samples, and the numbers that the model draws."""
    while loader.iteration < epochs:
        for batch in loader:
            shard = loader.logical_shard
            assert shard is not None and (shard.real_samples, shard.last) == (
                loader.real_samples,
                loader.end_of_dataloader,
            )
            drawn = (torch.rand(()).item(), float(np.random.rand()), random.random())
            yield (shard.epoch, shard.position, shard.index), shard, Record(batch.tolist(), drawn)


def run(loaders: list[ElasticLoader], stop: int | None = None) -> tuple[dict[Key, Record], list[Any]]:
    """The records of all ranks in the order of micro batches and ranks, and the states of the ranks at ``stop``."""
    rows, states = [], []
    for loader in loaders:
        found = []
        stepping = steps(loader, EPOCHS)
        for number, item in enumerate(stepping, start=1):
            found.append(item)
            if number == stop:
                break
        states.append(loader.state_dict())
        stepping.close()
        if stop is None:
            ends = [key for key, shard, _ in found if shard.last]
            assert ends == list({key[0]: key for key, *_ in found}.values()), "the last micro batch of each epoch"
        rows.append(found)
    assert len({len(found) for found in rows}) == 1, "all ranks have the same number of micro batches"
    records: dict[Key, Record] = {}
    for row in zip(*rows, strict=True):
        for key, shard, record in row:
            if shard.weight:
                assert key not in records
                records[key] = record
    return records, states


def check(drawn: Case) -> None:
    whole, _ = run(drawn.prepared(1, 0))
    sharded, states = run(drawn.prepared(drawn.before, drawn.workers_before), drawn.stop)
    assert list(sharded) == list(whole)[: len(sharded)], "the order is that of one process"
    assert all(sharded[key] == whole[key] for key in sharded), "so are samples and random numbers"
    assert all(state["order"] == states[0]["order"] and state["position"] == states[0]["position"] for state in states)
    resumed = drawn.prepared(drawn.after, drawn.workers_after, seed=99)
    for loader in resumed:
        loader.load_state_dict(pickle.loads(pickle.dumps(states[0])))
    rest, _ = run(resumed)
    first = (states[0]["epoch"], states[0]["position"], 0)
    expected = {key: record for key, record in whole.items() if key >= first}
    if states[0]["finished"]:
        expected = {key: record for key, record in whole.items() if key[0] > states[0]["epoch"]}
    assert list(rest) == list(expected) and rest == expected, "nothing is lost, nothing repeated but an open step"
    assert {*sharded, *rest} == {*whole}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_ranks_and_workers() -> None:
    for number in range(30):
        check(case(number))
    check(replace(case(7), stop=6))  # between two steps of a batch sampler of another kind


@pytest.mark.slow  # hundreds of runs, some with workers
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("first", range(30, 330, 100))
def test_hundreds_of_combinations(first: int) -> None:
    for number in range(first, first + 100):
        try:
            check(case(number))
        except AssertionError as error:
            raise AssertionError(f"case({number}): {case(number)}: {error}") from error


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_shard_is_computed_once(count: int) -> None:
    for samples in range(1, 20):
        for world in range(1, 10):
            ranks = [shard_ranges(samples, count, world, rank) for rank in range(world)]
            own = sorted((part.index, part.begin, part.end) for parts in ranks for part in parts if not part.is_padding)
            assert [index for index, *_ in own] == list(range(min(count, samples)))
            assert [number for _, begin, end in own for number in range(begin, end)] == list(range(samples))
            assert len({len(parts) for parts in ranks}) == 1


def loader_of(world: int = 1, rank: int = 0, batch_size: int = 8, length: int = 40, **settings: Any) -> ElasticLoader:
    return prepare_data_loader(
        DataLoader(Items(length), batch_size=batch_size, collate_fn=collate),
        num_processes=world,
        process_index=rank,
        elastic=True,
        logical_shards=4,
        data_seed=1,
        **settings,
    )


def test_sizes() -> None:
    loader = loader_of(world=2, length=37)
    assert (len(loader), loader.steps_per_epoch, loader.batch_size, loader.total_batch_size) == (10, 5, 2, 8)
    assert loader.total_dataset_length == 37 and isinstance(loader.dataset, Items)
    assert loader.ragged and not loader_of(world=2).ragged and loader_of(world=3).ragged
    weights = [loader.logical_shard.weight for _ in loader if loader.logical_shard is not None]
    assert weights == [0.25] * 10
    alone = loader_of(world=8, rank=7)
    assert [alone.logical_shard.weight for _ in alone if alone.logical_shard is not None] == [0.0] * 5


def test_the_number_of_steps() -> None:
    assert [loader_of(length=length).steps_per_epoch for length in (32, 33, 40, 41)] == [4, 5, 5, 6]
    batches = Buckets(20)
    batches.batch_size = 3  # batches of this size at most, in up to three shards, two at a time
    loader = prepare_data_loader(
        DataLoader(Items(20), batch_sampler=batches), num_processes=2, process_index=0, elastic=True, logical_shards=4
    )
    assert (len(loader), loader.steps_per_epoch) == (40, 20)
    stream = prepare_data_loader(
        DataLoader(Stream(11), batch_size=4, drop_last=True), num_processes=1, process_index=0, elastic=True
    )
    assert [int(batch[0]) for batch in stream] == list(range(8))


def test_steps_of_several_global_batches() -> None:
    """Gradient accumulation: a shard of each batch after another; the last step has the batches that are left."""
    plan = ElasticPlan(4, 2, 1, 0, False, False, seed=0, window=2)
    sampler = ElasticSampler(BatchSampler(range(20), 4, False), plan)
    requests = list(sampler)
    assert [request.indices for request in requests] == [
        *([0, 1], [4, 5], [2, 3], [6, 7]),
        *([8, 9], [12, 13], [10, 11], [14, 15]),
        *([16, 17], [18, 19]),
    ]
    shards = [request.shard for request in requests]
    assert [shard.ends_shard for shard in shards] == [False, True] * 4 + [True, True]
    assert [shard.ends_step for shard in shards] == [False, False, False, True] * 2 + [False, True]
    assert [shard.last for shard in shards] == [False] * 9 + [True]
    assert [shard.weight for shard in shards] == [0.25] * 8 + [0.5] * 2
    # Without lockstep a rank that has no shard left repeats one, and has no padding otherwise.
    apart = [replace(plan, num_processes=3, process_index=rank, lockstep=False) for rank in range(3)]
    found = [[(s.index, s.weight) for s in one.shards(0, [0], 4, 4, 4, True)] for one in apart]
    assert found == [[(0, 0.5)], [(1, 0.5)], [(0, 0.0)]]
    many = [replace(plan, logical_shards=4, num_processes=3, process_index=rank, lockstep=False) for rank in range(3)]
    assert [[s.index for s in one.shards(0, [0], 4, 4, 4, True)] for one in many] == [[0, 3], [1], [2]]


def test_one_seed_for_the_samples_of_a_shard() -> None:
    shard = ElasticPlan(4, 2, 1, 0, False, False, seed=0).shards(0, [0], 4, 4, 4, True)[0]
    each, one = (ShardedItems(Items(4), seeds).__getitems__(ShardRequest(shard, [0, 1])) for seeds in (True, False))
    assert each.samples[0] == one.samples[0] and each.samples[1][1:] != one.samples[1][1:]
    seed_generators(shard.seed_for(FOR_SAMPLE))
    assert one.samples == [sample(0), sample(1)]


def test_the_epoch_reaches_the_sampler_inside() -> None:
    class Told(FromNumpy):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    told = Told(8)
    loader = prepare_data_loader(
        DataLoader(Items(8), batch_sampler=BatchSampler(told, 4, False)),
        num_processes=1,
        process_index=0,
        elastic=True,
    )
    for epoch in range(3):
        list(loader)
        assert told.epoch == epoch


def test_an_order_stays_what_it_is() -> None:
    """A run resumes with the order that an older version began."""
    loader = prepare_data_loader(
        DataLoader(range(8), batch_size=8, sampler=SubsetRandomSampler(range(8))),
        num_processes=1,
        process_index=0,
        elastic=True,
        data_seed=1,
    )
    assert torch.cat(list(loader)).tolist() == [3, 0, 7, 6, 4, 1, 5, 2]


def test_skipping_whole_steps() -> None:
    positioned = prepare_data_loader(
        DataLoader(Positioned(8), batch_size=4), num_processes=1, process_index=0, elastic=True
    )
    assert [int(index) for batch in skip_first_batches(positioned, 4) for index in batch[0]] == [4, 5, 6, 7]
    expected = [batch.tolist() for batch in loader_of(world=2)][4:]
    assert [batch.tolist() for batch in skip_first_batches(loader_of(world=2), 4)] == expected
    with pytest.raises(ConfigurationError, match="cannot skip 3 batches .* Skip 2 or 4"):
        next(iter(skip_first_batches(loader_of(world=2), 3)))


def test_a_loop_inside_the_loop() -> None:
    def drawn(nested: bool) -> list[float]:
        loader, other = loader_of(), loader_of()
        numbers = []
        for _ in loader:
            if nested:
                for _ in other:
                    torch.rand(3)
            numbers.append(torch.rand(()).item())
        return numbers

    assert drawn(nested=True) == drawn(nested=False)


def test_another_sampler() -> None:
    def order(world: int) -> list[float]:
        loaders = [loader_of(world, rank) for rank in range(world)]
        for loader in loaders:
            loader.set_sampler(RandomSampler(loader.dataset))
        rows = zip(*([batch[:, 0].tolist() for batch in loader] for loader in loaders), strict=True)
        return [index for row in rows for part in row for index in part]

    assert sorted(order(1)) == list(range(40)) and order(1) == order(2) != list(range(40))
    stream = prepare_data_loader(DataLoader(Stream(8), batch_size=2), num_processes=1, process_index=0, elastic=True)
    with pytest.raises(ConfigurationError, match="cannot be replaced"):
        stream.set_sampler(range(8))


def test_copies_are_independent() -> None:
    loader = loader_of()
    expected = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    for duplicate in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        duplicate.set_epoch(0)
        assert [batch.tolist() for batch in duplicate] == expected


def test_what_depends_on_the_processes_is_refused() -> None:
    def refused(match: str, loader: DataLoader[Any], **settings: Any) -> None:
        with pytest.raises(ConfigurationError, match=match):
            prepare_data_loader(loader, num_processes=2, process_index=0, elastic=True, data_seed=0, **settings)

    items = Items(8)
    refused("batch_size=None", DataLoader(items, batch_size=None))
    refused("batch_size=None", DataLoader(Stream(8), batch_size=None))
    refused("DistributedSampler for 2", DataLoader(items, sampler=DistributedSampler(items, 2, 0)))
    refused("logical_shards=0 must be a positive integer", DataLoader(items), logical_shards=0)
    refused("already_sharded", DataLoader(items), already_sharded=True)
    refused("use_stateful_dataloader", DataLoader(items), use_stateful_dataloader=True)
    refused("2 parts of the devices", DataLoader(items), batches_per_step=2)

    class Endless(Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    refused("Endless has no length", DataLoader(items, sampler=Endless()))
    plain = prepare_data_loader(DataLoader(items), num_processes=1, process_index=0)
    with pytest.raises(ConfigurationError, match="counts samples.*counts elastic samples"):
        loader_of().load_state_dict(plain.state_dict())
    with pytest.raises(ConfigurationError, match="counts elastic samples.*counts samples"):
        plain.load_state_dict(loader_of().state_dict())
