"""Iterable data, simulated over all ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accel_data import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard, prepare_data_loader
from accel_data.iterable_shard import (
    CountedBatch,
    StatefulIterableDatasetShard,
    can_shard_at_source,
    is_already_split,
    shard_at_source,
)
from accel_state.errors import ConfigurationError

flags = st.booleans()


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class Sources(Stream):
    """Sources that are dealt to the ranks, each read once."""

    def __init__(self, sources: list[list[int]], count: str = "num_shards") -> None:
        super().__init__(sum(map(len, sources)))
        self.sources = sources
        setattr(self, count, len(sources))
        self.reads = 0

    def shard(self, num_shards: int, index: int) -> Sources:
        return Sources(self.sources[index::num_shards])

    def __iter__(self) -> Any:
        for source in self.sources:
            for number in source:
                self.reads += 1
                yield number


@given(
    length=st.integers(0, 50), size=st.integers(1, 4), world=st.integers(1, 4), drop_last=flags, split=flags, even=flags
)
def test_ranks_put_together_are_the_stream(
    length: int, size: int, world: int, drop_last: bool, split: bool, even: bool
) -> None:
    plain = DataLoader(Stream(length), batch_size=size * world if split else size, drop_last=drop_last)
    loaders = [
        prepare_data_loader(
            plain,
            num_processes=world,
            process_index=rank,
            split_batches=split,
            even_batches=even,
            dispatch_batches=False,
        )
        for rank in range(world)
    ]
    steps: list[list[list[int]]] = []
    remainders = set()
    for loader in loaders:
        own = []
        for batch in loader:
            own.append(batch.tolist()[: loader.real_samples])
            if even and world > 1:
                assert len(batch) == size
        remainders.add(loader.remainder if own and loader.end_of_dataloader else None)
        steps.append(own)
    count = max(map(len, steps))
    stream = [x for step in range(count) for own in steps if step < len(own) for x in own[step]]
    expected = (
        length // (size * world) * size * world
        if drop_last and world > 1
        else length // size * size
        if drop_last
        else length
    )
    assert stream == list(range(expected))
    if even and world > 1:
        assert {len(own) for own in steps} == {count}
        assert remainders <= {(length % (size * world)) or -1, None, -1 if drop_last else None}


@given(
    length=st.integers(0, 40),
    size=st.integers(1, 4),
    world=st.integers(1, 4),
    drop_last=flags,
    even=flags,
    start=st.integers(0, 45),
)
def test_a_shard_begun_anywhere(length: int, size: int, world: int, drop_last: bool, even: bool, start: int) -> None:
    shards = [IterableDatasetShard(Stream(length), size, drop_last, world, rank) for rank in range(world)]
    for shard in shards:
        shard.even_batches = even
        assert len(list(shard)) == len(shard)
        shard.begin_at(start)
    parts = [list(shard) for shard in shards]
    left = list(range(start, length))
    full = len(left) // (size * world) * size * world
    kept = left[: full if drop_last else None]
    seen = sorted({x for part in parts for x in part})
    assert set(kept) <= set(seen)
    if not even or drop_last:
        assert seen == kept
    assert all(list(shard) == list(shard) for shard in shards)


@pytest.mark.parametrize("count", ["num_shards", "n_shards"])
def test_sources_are_dealt_to_the_ranks(count: str) -> None:
    data = Sources([[1, 2], [3], [4, 5, 6]], count)
    assert can_shard_at_source(data, 3)
    assert not can_shard_at_source(data, 4)
    assert not can_shard_at_source(Stream(3), 2)
    assert [list(shard_at_source(data, 2, rank)) for rank in range(2)] == [[1, 2, 4, 5, 6], [3]]


def test_kinds_of_loaders_for_iterable_data() -> None:
    def kind(data: Any, **options: Any) -> Any:
        return prepare_data_loader(DataLoader(data, batch_size=2), num_processes=2, process_index=1, **options)

    shared = kind(Stream(8))
    assert isinstance(shared.dataset, IterableDatasetShard)
    assert not shared.ragged
    own = kind(Sources([[1], [2]]), put_on_device=True)
    assert isinstance(own, DataLoaderShard)
    assert own.dataset.sources == [[2]]
    assert own.ragged
    assert kind(Sources([[1, 2]])).dataset.dataset.sources == [[1, 2]], "one source cannot be split for two ranks"
    assert isinstance(prepare_data_loader(DataLoader(Stream(3)), dispatch_batches=True), DataLoaderDispatcher)


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_a_batch_is_pinned_with_its_counts() -> None:
    """As the loader's thread does it, with a batch that pins itself: tensors need a GPU."""
    assert CountedBatch(Pinnable(), 3, 7).pin_memory() == CountedBatch("pinned", 3, 7)


def test_data_that_is_split_already() -> None:
    data = Stream(4)
    assert not is_already_split(data)
    data.already_sharded = True
    assert is_already_split(data)
    loader = prepare_data_loader(DataLoader(data), num_processes=2, process_index=0, put_on_device=True)
    assert loader.dataset is data

    class Distributed:
        world_size = 2

    marked = Stream(4)
    marked._distributed = Distributed()
    assert is_already_split(marked)


def test_a_shard_method_with_other_arguments_is_refused() -> None:
    class Odd(Stream):
        num_shards = 4

        def shard(self, of: int, which: int) -> Odd:
            return self

    with pytest.raises(ConfigurationError, match=r"Odd.shard.*\(of, which\).*shard\(num_shards, index\)"):
        prepare_data_loader(DataLoader(Odd(3)), num_processes=2, process_index=0)


def test_split_batches_must_divide() -> None:
    with pytest.raises(ConfigurationError, match="of 3 cannot.*among 2 processes"):
        IterableDatasetShard(Stream(4), 3, num_processes=2, split_batches=True)


def test_the_epoch_is_passed_on() -> None:
    class Shuffled(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch] * 2)

    loader = prepare_data_loader(DataLoader(Shuffled(2)), num_processes=2, process_index=0, dispatch_batches=False)
    assert [[batch.item() for batch in loader] for _ in range(3)] == [[0], [1], [2]]
    workers = prepare_data_loader(DataLoader(Shuffled(2), num_workers=1, persistent_workers=True))
    assert [[batch.item() for batch in workers] for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


class Resumable(Stream):
    """Reads on where its state says."""

    position = 0

    def __iter__(self) -> Any:
        begin, self.position = self.position, 0
        for number in range(begin, self.length):
            self.position = number + 1
            yield number
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_resumed_stream_is_completed_from_its_start() -> None:
    """Which the data set does not yield again: eleven samples on two ranks, with batches of two."""
    whole = StatefulIterableDatasetShard(Resumable(11), 2, num_processes=2, process_index=1)
    assert list(whole) == [2, 3, 6, 7, 10, 0] == list(whole)
    first = iter(whole)
    assert [next(first), next(first)] == [2, 3]
    state = whole.state_dict()
    assert state == {"position": 4}
    resumed = StatefulIterableDatasetShard(Resumable(11), 2, num_processes=2, process_index=1)
    resumed.load_state_dict(state)
    assert list(resumed) == [6, 7, 10, 0]
    assert list(resumed) == [2, 3, 6, 7, 10, 0], "the next epoch begins at the start"
