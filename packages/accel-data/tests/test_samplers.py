"""Samplers and the randomness behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_data import SeedableRandomSampler, SkipBatchSampler, get_sampler, prepare_data_loader
from accel_data.epoch_rng import SamplerRng
from accel_data.rng_state import capture_rng, from_plain, preserve_rng, restore_rng, to_plain
from accel_data.samplers import (
    PermutationSource,
    StreamSource,
    is_plain_batch_sampler,
    permutation,
    random_access_source,
    skip_permutation,
)
from accel_state.errors import ConfigurationError


def test_a_seedable_sampler_is_drawn_from_seed_plus_epoch() -> None:
    sampler = SeedableRandomSampler(range(12), data_seed=5)
    # The reference library (1.15, run as a black box) gives this order for the seed 5.
    assert list(sampler) == [11, 0, 9, 6, 10, 3, 4, 5, 8, 7, 1, 2]
    assert sampler.epoch == 1
    assert list(sampler) == torch.randperm(12, generator=torch.Generator().manual_seed(6)).tolist()
    sampler.set_epoch(0)
    torch.rand(3)
    assert sampler.permutation().tolist() == [11, 0, 9, 6, 10, 3, 4, 5, 8, 7, 1, 2]
    large = SeedableRandomSampler(range(12), data_seed=12345)
    assert list(large) == torch.randperm(12, generator=torch.Generator().manual_seed(12345)).tolist()
    assert large.is_permutation and not SeedableRandomSampler(range(3), num_samples=2).is_permutation


def test_the_seed_defaults_to_that_of_torch_and_may_be_the_largest() -> None:
    torch.manual_seed(31)
    assert SeedableRandomSampler(range(3)).initial_seed == 31
    sampler = SeedableRandomSampler(range(3), data_seed=2**64 - 1)
    sampler.set_epoch(5)
    assert sorted(sampler) == [0, 1, 2]


def test_a_seedable_sampler_with_replacement_is_no_permutation() -> None:
    sampler = SeedableRandomSampler(range(3), replacement=True, num_samples=10, data_seed=1)
    assert not sampler.is_permutation
    assert random_access_source(sampler) is None
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert len(first) == 10


def test_skipping_batches_of_a_sampler() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, True)
    skipped = SkipBatchSampler(batches, 2)
    assert list(skipped) == list(skipped) == [[6, 7, 8]]
    assert (len(skipped), skipped.total_length, skipped.batch_size, skipped.drop_last) == (1, 3, 3, True)
    assert skipped.sampler is batches.sampler
    assert len(SkipBatchSampler(batches, 7)) == 0
    assert list(SkipBatchSampler(batches)) == list(batches) and len(SkipBatchSampler(batches)) == 3
    with pytest.raises(ConfigurationError, match="skip_batches=-1 must be at least 0"):
        SkipBatchSampler(batches, -1)


def test_finding_the_sampler_of_a_loader() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([])

    random = RandomSampler(range(4))
    loader = DataLoader(range(4), sampler=random, batch_size=2)
    assert get_sampler(loader) is get_sampler(prepare_data_loader(loader)) is random
    assert get_sampler(DataLoader(range(4), sampler=random, batch_size=None)) is random
    assert get_sampler(DataLoader(Stream())) is None
    batches = [[0, 1]]
    assert get_sampler(DataLoader(range(4), batch_sampler=batches)) is batches


def test_indices_of_a_permutation_are_converted_as_they_are_used() -> None:
    source = PermutationSource(torch.arange(1000).flip(0))
    assert source.take(2, 5) == [997, 996, 995]
    assert list(source.batches(10, 2, 300, 3)) == [[989, 988], [689, 688], [389, 388]]
    assert list(source.batches(0, 1, 1, 1000)) == [[i] for i in range(999, -1, -1)]
    assert list(source.batches(0, 4, 8, 0)) == []


def test_a_source_is_the_sampler_that_it_stands_for() -> None:
    """Its order, and the state of the generator after an epoch, from which the next order is drawn."""
    assert random_access_source(SequentialSampler(range(9))).take(2, 5) == [2, 3, 4]  # type: ignore[union-attr]
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    source = random_access_source(RandomSampler(range(9), generator=generators[0]))
    assert source is not None
    taken = source.take(0, 9)
    assert taken == list(RandomSampler(range(9), generator=generators[1]))
    source.close()
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("length", [0, 1, 2, 3, 625, (1 << 18) + 1, (1 << 18) + 2, 700_000])
def test_a_generator_skips_a_permutation_without_drawing_it(length: int) -> None:
    drawn, skipped = (torch.Generator().manual_seed(length) for _ in range(2))
    torch.randperm(length, generator=drawn)
    calls: list[str] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    skip_permutation(0, torch.Generator())  # the first call of a process looks at how torch draws
    with Calls():
        skip_permutation(length, skipped)
    assert torch.equal(drawn.get_state(), skipped.get_state())
    assert "randperm" not in calls and "empty" in calls


def test_plain_batch_samplers() -> None:
    class Buckets(BatchSampler):
        """Its batches need not be consecutive runs."""

    plain = BatchSampler(SequentialSampler(range(9)), 2, False)
    assert is_plain_batch_sampler(plain) is True
    assert not is_plain_batch_sampler(Buckets(plain.sampler, 2, False))
    assert not is_plain_batch_sampler([[0, 1]])


def test_a_stream_remembers_its_head() -> None:
    stream = StreamSource(iter(range(200_000)), head_size=3)
    stream.skip(150_000)
    assert stream.head == [0, 1, 2]
    assert stream.read(2) == [150_000, 150_001]
    stream.skip(10**9)
    assert stream.read(1) == []
    in_parts = StreamSource(iter(range(9)), head_size=3)
    assert [in_parts.read(2), in_parts.read(2)] == [[0, 1], [2, 3]] and in_parts.head == [0, 1, 2]


def test_the_first_indices_of_a_stream_are_told_once() -> None:
    told: list[list[Any]] = []
    stream = StreamSource(iter(range(9)), head_size=0, on_first=told.append)
    stream.skip(0)
    stream.read(2), stream.read(2)
    assert told == [[0, 1]]


def test_a_random_sampler_is_given_the_generator_it_would_have_made_itself() -> None:
    torch.manual_seed(3)
    expected = list(RandomSampler(range(9)))
    torch.manual_seed(3)
    sampler = RandomSampler(range(9))
    order = SamplerRng(sampler)
    with order.draw_order() as origin:
        drawn = torch.randperm(9, generator=sampler.generator).tolist()
    assert drawn == expected
    torch.rand(5)
    with order.draw_order(origin):
        assert torch.randperm(9, generator=sampler.generator).tolist() == expected


@pytest.mark.parametrize("form", ["tensors", "numbers"])
def test_random_state_is_left_as_it_was_and_survives_plain_values(form: str) -> None:
    import random

    import numpy as np

    plain = to_plain(capture_rng())
    if form == "numbers":  # as it was saved earlier
        (kind, words, *rest), python = plain["numpy"], plain["python"]
        plain |= {"numpy": (kind, words.tolist(), *rest), "python": (python[0], tuple(python[1].tolist()), python[2])}
    state = from_plain(plain)
    with preserve_rng():
        first = torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)
    assert (torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)) == first
    restore_rng(state)
    assert (torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)) == first


def test_permutations_of_more_than_int32_can_count() -> None:
    """On the meta device, where they take no memory."""
    with torch.device("meta"):
        for length, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64), (2**33, torch.int64)):
            assert permutation(length, None).dtype == dtype
