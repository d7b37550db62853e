"""Samplers and the randomness behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_data import SeedableRandomSampler, SkipBatchSampler, get_sampler, prepare_data_loader
from accel_data.epoch_rng import SamplerRng
from accel_data.rng_state import capture_rng, from_plain, preserve_rng, restore_rng, to_plain
from accel_data.samplers import PermutationSource, StreamSource, random_access_source
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


def test_a_stream_remembers_its_head() -> None:
    stream = StreamSource(iter(range(200_000)), head_size=3)
    stream.skip(150_000)
    assert stream.head == [0, 1, 2]
    assert stream.read(2) == [150_000, 150_001]
    stream.skip(10**9)
    assert stream.read(1) == []


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


def test_random_state_is_left_as_it_was_and_survives_plain_values() -> None:
    import random

    import numpy as np

    state = from_plain(to_plain(capture_rng()))
    with preserve_rng():
        first = torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)
    assert (torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)) == first
    restore_rng(state)
    assert (torch.rand(()).item(), np.random.rand(), random.gauss(0, 1)) == first
