"""Sharded batch samplers, simulated over all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from accel_data import BatchSamplerShard, ItemShard, SeedableRandomSampler
from accel_data.batch_shard import EpochStart, ShardedSampler
from accel_state.errors import ConfigurationError

flags = st.booleans()


class Ordered:
    """A sampler that can only be read in order, and counts how far it was."""

    def __init__(self, length: int, sized: bool = True) -> None:
        self.length = length
        self.drawn = 0
        if sized:
            self.__class__ = _SizedOrdered

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.drawn += 1
            yield index


class _SizedOrdered(Ordered):
    def __len__(self) -> int:
        return self.length


class Custom(BatchSampler):
    """The batches of torch's class, from a class that could yield anything."""


class Batches:
    def __init__(self, batches: list[list[int]], batch_size: int | None = None, drop_last: bool = False) -> None:
        self.batches = batches
        if batch_size is not None:
            self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def epoch(shard: ShardedSampler) -> list[tuple[Any, int | None, bool]]:
    """Every batch with the number of samples that are no padding, and whether it was announced as the last one."""
    drawn = []
    iterator = iter(shard)
    progress = shard.progress
    for step, batch in enumerate(iterator):
        drawn.append((batch, progress.real.get(step), progress.total == step + 1))
    assert progress.total == len(drawn)
    return drawn


def put_together(shards: list[Any]) -> list[int]:
    """The real samples of all ranks, step by step in the order of ranks."""
    epochs = [epoch(shard) for shard in shards]
    for own in epochs:
        assert [last for _, _, last in own] == [False] * (len(own) - 1) + [True] * bool(own)
    stream = []
    for step in range(max(map(len, epochs))):
        for own in epochs:
            if step < len(own):
                batch, real, _ = own[step]
                stream += batch if real is None else batch[:real]
    return stream


@pytest.mark.parametrize("kind", ["sequential", "ordered", "unsized", "custom"])
@given(
    length=st.integers(0, 60), size=st.integers(1, 5), world=st.integers(1, 5), drop_last=flags, split=flags, even=flags
)
def test_ranks_put_together_are_the_data_set(
    kind: str, length: int, size: int, world: int, drop_last: bool, split: bool, even: bool
) -> None:
    batch_size = size * world if split else size

    def shard(rank: int) -> BatchSamplerShard:
        sampler: Any = (
            SequentialSampler(range(length)) if kind in ("sequential", "custom") else Ordered(length, kind == "ordered")
        )
        batches = (Custom if kind == "custom" else BatchSampler)(sampler, batch_size, drop_last)
        return BatchSamplerShard(batches, world, rank, split, even)

    shards = [shard(rank) for rank in range(world)]
    expected = length // (size * world) * size * world if drop_last else length
    assert put_together(shards) == list(range(expected))
    lists = [list(shard) for shard in shards]
    if even:
        assert {len(own) for own in lists} == {len(lists[0])}
        assert all(len(batch) == size for own in lists for batch in own)
    if kind in ("sequential", "ordered"):
        assert [len(shard) for shard in shards] == [len(own) for own in lists]


@given(
    sizes=st.lists(st.integers(1, 6), max_size=20),
    world=st.integers(1, 5),
    split=flags,
    batch_size=st.none() | st.just(6),
    drop_last=flags,
)
def test_batches_of_any_size_lose_nothing_and_give_every_rank_the_same_number_of_steps(
    sizes: list[int], world: int, split: bool, batch_size: int | None, drop_last: bool
) -> None:
    if split and batch_size is not None:
        batch_size *= world
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = [list(range(first, last)) for first, last in pairwise(bounds)]
    shards = [BatchSamplerShard(Batches(batches, batch_size, drop_last), world, rank, split) for rank in range(world)]
    kept = len(batches) // world * world if drop_last and not split else len(batches)
    assert put_together(shards) == list(range(bounds[kept]))
    assert {len(list(shard)) for shard in shards} == {len(shards[0])}
    assert shards[0].ragged == (world > 1)
    assert all(batch for shard in shards for batch in shard)


@given(length=st.integers(0, 20), world=st.integers(1, 5), even=flags)
def test_items_without_batching(length: int, world: int, even: bool) -> None:
    shards = [ItemShard(SequentialSampler(range(length)), world, rank, even) for rank in range(world)]
    epochs = [epoch(shard) for shard in shards]
    steps = max(map(len, epochs))
    seen = [own[step][0] for step in range(steps) for own in epochs if step < len(own) and own[step][1] != 0]
    assert seen == list(range(length))
    assert [len(shard) for shard in shards] == [len(own) for own in epochs]
    if even:
        assert {len(own) for own in epochs} == {steps}


# What the reference library's BatchSamplerShard gives (version 1.15, run as a black box): (length, batch size, ranks,
# drop_last, split_batches, even_batches) and the batches of each rank.
REFERENCE = [
    ((7, 3, 2, False, False, True), [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]),
    ((1, 3, 2, False, False, True), [[[0, 0, 0]], [[0, 0, 0]]]),
    ((13, 3, 2, False, False, False), [[[0, 1, 2], [6, 7, 8], [12]], [[3, 4, 5], [9, 10, 11]]]),
    ((10, 3, 2, True, False, True), [[[0, 1, 2]], [[3, 4, 5]]]),
    ((7, 4, 2, False, True, True), [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
    ((10, 4, 2, False, True, False), [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]),
    ((10, 3, 1, False, False, True), [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]]),
]


@pytest.mark.parametrize(("case", "expected"), REFERENCE)
@pytest.mark.parametrize("kind", [BatchSampler, Custom])
def test_same_batches_as_the_reference(case: Any, expected: Any, kind: type[BatchSampler]) -> None:
    length, size, world, drop_last, split, even = case
    batches = kind(SequentialSampler(range(length)), size, drop_last)
    assert [list(BatchSamplerShard(batches, world, rank, split, even)) for rank in range(world)] == expected


def samplers(length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "sequential": SequentialSampler(range(length)),
        "random": RandomSampler(range(length), generator=generator),
        "seedable": SeedableRandomSampler(range(length), data_seed=3),
        "replacement": RandomSampler(range(length), replacement=True, num_samples=length, generator=generator),
        "weighted": WeightedRandomSampler([1.0] * length, length, generator=generator),
        "ordered": Ordered(length),
    }


@pytest.mark.parametrize("name", list(samplers(1)))
@pytest.mark.parametrize("kind", [BatchSampler, Custom])
@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_begun_anywhere_is_the_rest_of_it(name: str, kind: type[BatchSampler], world: int) -> None:
    length = 29
    for rank in range(world):
        shard = BatchSamplerShard(kind(samplers(length)[name], 2, False), world, rank, even_batches=world > 1)
        whole = list(shard)
        origin, step_size = shard.progress.origin, shard.step_size
        following = list(shard)
        for steps in range(len(whole) + 1):
            other = BatchSamplerShard(kind(samplers(length)[name], 2, False), world, rank, even_batches=world > 1)
            position = min(steps * step_size, length if shard.unit == "samples" else 15)
            assert other.length_from(position) == len(whole) - steps
            other.begin_at(EpochStart(position, origin))
            assert list(other) == whole[steps:]
            if isinstance(other.sampler, SeedableRandomSampler):
                other.sampler.set_epoch(shard.sampler.epoch - (0 if kind is BatchSampler else 1))
            assert list(other) == following


def test_other_ranks_indices_are_not_drawn_where_arithmetic_will_do() -> None:
    """A rank's last batch of a hundred million samples, at once: drawing what the other 16,383 ranks get would take
    minutes.
    """
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(100_000_000)), 8, False), 16_384, 16_383)
    shard.begin_at(EpochStart(762 * 8 * 16_384))
    last = list(shard)
    assert last == [[(762 * 8 * 16_384 + 16_383 * 8 + i) % 100_000_000 for i in range(8)]]


def test_completion_to_a_multiple() -> None:
    for length in range(20):
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(length)), 4, False), even_batches=False)
        shard.complete_to = 3
        drawn = epoch(shard)
        indices = [index for batch, _, _ in drawn for index in batch]
        assert len(indices) % 3 == 0
        assert indices == [index % length for index in range(-(-length // 3) * 3)]
        assert [real for _, real, _ in drawn if real is not None] == ([(length - 1) % 4 + 1] if length % 3 else [])


def test_a_shard_that_lightning_makes_anew_says_what_to_do() -> None:
    """Lightning gives the arguments of torch's BatchSampler, and would divide the samples a second time."""
    sampler = SequentialSampler(range(22))
    with pytest.raises(ConfigurationError, match=r"again with batch_size, drop_last.*use_distributed_sampler=False"):
        BatchSamplerShard(sampler, batch_size=2, drop_last=False)


def test_which_ranks_have_the_same_number_of_steps() -> None:
    """Only for the others do ranks compare what they read."""
    plain = BatchSampler(SequentialSampler(range(9)), 2, False)
    dropping = BatchSampler(SequentialSampler(range(9)), 2, True)
    assert BatchSamplerShard(plain, even_batches=False).has_even_steps
    assert not BatchSamplerShard(plain, 2, even_batches=False).has_even_steps
    assert not BatchSamplerShard(plain, 3, even_batches=False).has_even_steps
    assert BatchSamplerShard(plain, 3).has_even_steps
    assert BatchSamplerShard(dropping, 3, even_batches=False).has_even_steps
    assert ItemShard(range(9), even_batches=False).has_even_steps and ItemShard(range(9), 2).has_even_steps
    assert not any(ItemShard(range(9), world, even_batches=False).has_even_steps for world in (2, 3))


def test_the_length_of_a_stream_of_items_is_known_at_its_end() -> None:
    assert list(ItemShard(range(5))) == [0, 1, 2, 3, 4]
    shard = ItemShard(range(5), 2, 1)
    assert list(shard) == [1, 3, 0] and shard.progress.length == 5
    shard.begin_at(EpochStart(position=2))
    assert list(shard) == [3, 0] and shard.progress.length == 5
