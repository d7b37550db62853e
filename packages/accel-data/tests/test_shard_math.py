"""The arithmetic of sharding, compared to a plain enumeration, and at sizes that only arithmetic can handle."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_data.shard_math import ShardPlan, balanced_range, per_process_batch_size, wrapped_ranges
from accel_state.arguments import check_rank
from accel_state.errors import ConfigurationError

lengths = st.integers(0, 120)
sizes = st.integers(1, 9)
worlds = st.integers(1, 9)
flags = st.booleans()


def positions(plan: ShardPlan, rank: int, step: int) -> list[int]:
    return [position for run in plan.ranges(rank, step) for position in run]


@given(lengths, sizes, worlds, flags, flags, st.integers(0, 130))
@example(10, 4, 2, False, False, 0)  # an uneven end: half a batch on rank 0, none on rank 1
def test_ranks_put_together_are_the_stream(
    length: int, size: int, world: int, drop_last: bool, even: bool, start: int
) -> None:
    plan = ShardPlan(length, size, world, drop_last, even, start)
    steps = max(plan.steps(rank) for rank in range(world))
    stream: list[int] = []
    for step in range(steps):
        for rank in range(world):
            if step < plan.steps(rank):
                batch = positions(plan, rank, step)
                real = plan.real_samples(rank, step)
                assert len(batch) == (size if even else real) > 0
                stream += batch[:real]
    left = max(0, length - start)
    expected = left // (size * world) * size * world if drop_last else left
    assert stream == list(range(start, start + expected))
    assert plan.samples == expected
    if even:
        assert len({plan.steps(rank) for rank in range(world)}) == 1


@given(st.integers(1, 120), sizes, worlds)
def test_padding_starts_over_at_the_first_sample(length: int, size: int, world: int) -> None:
    plan = ShardPlan(length, size, world)
    last = plan.steps(0) - 1
    step = [position for rank in range(world) for position in positions(plan, rank, last)]
    begin = last * plan.step_size
    assert step == [position % length for position in range(begin, begin + plan.step_size)]
    assert plan.remainder == (length % plan.step_size or -1)


@given(lengths, sizes, worlds, flags, st.integers(0, 40))
def test_an_epoch_continued_at_a_step_is_the_rest_of_the_epoch(
    length: int, size: int, world: int, drop_last: bool, steps: int
) -> None:
    whole = ShardPlan(length, size, world, drop_last)
    rest = ShardPlan(length, size, world, drop_last, start=whole.position_after(steps))
    for rank in range(world):
        all_batches = [positions(whole, rank, step) for step in range(whole.steps(rank))]
        if whole.position_after(steps) % whole.step_size == 0:
            assert [positions(rest, rank, step) for step in range(rest.steps(rank))] == all_batches[steps:]


@given(lengths, sizes, worlds, sizes, worlds, st.integers(0, 20))
def test_another_number_of_ranks_continues_without_loss_or_repetition(
    length: int, size: int, world: int, new_size: int, new_world: int, steps: int
) -> None:
    before = ShardPlan(length, size, world)
    steps = min(steps, before.steps(0))
    handed_out = [
        p for s in range(steps) for r in range(world) for p in positions(before, r, s)[: before.real_samples(r, s)]
    ]
    after = ShardPlan(length, new_size, new_world, start=before.position_after(steps))
    rest = [
        p
        for s in range(after.steps(0))
        for r in range(new_world)
        for p in positions(after, r, s)[: after.real_samples(r, s)]
    ]
    assert handed_out + rest == list(range(length))


@given(st.integers(0, 300), worlds)
def test_balanced_pieces_partition_and_differ_by_at_most_one(total: int, world: int) -> None:
    pieces = [balanced_range(total, world, rank) for rank in range(world)]
    assert [i for piece in pieces for i in piece] == list(range(total))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40))
def test_wrapped_ranges_fold_positions_back(first: int, count: int, length: int) -> None:
    folded = [p for run in wrapped_ranges(first, first + count, length) for p in run]
    assert folded == [p % length for p in range(first, first + count)]


@pytest.mark.parametrize("rank", [0, 1, 8191, 16383])
def test_a_hundred_million_samples_on_16384_ranks_take_no_memory(rank: int) -> None:
    length, size, world = 100_000_000, 8, 16_384
    plan = ShardPlan(length, size, world)
    tracemalloc.start()
    try:
        first, last = positions(plan, rank, 0), positions(plan, rank, plan.steps(rank) - 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan.steps(rank) == 763
    assert first == list(range(rank * size, rank * size + size))
    assert last == [(762 * size * world + rank * size + i) % length for i in range(size)]
    # A list of what all ranks get in one step would take a megabyte; what other threads take meanwhile is counted too.
    assert peak < 200_000


def test_a_batch_that_cannot_be_divided_names_both_numbers_and_the_sizes_that_can() -> None:
    assert per_process_batch_size(12, 4) == 3
    with pytest.raises(ConfigurationError, match="of 10 cannot.*among 4 processes.*of 8 or 12"):
        per_process_batch_size(10, 4)
    with pytest.raises(ConfigurationError, match="of 3 cannot.*among 4 processes.*of 4"):
        per_process_batch_size(3, 4)


def test_a_rank_outside_the_world_is_refused() -> None:
    check_rank(4, 3), check_rank(1, 0)
    with pytest.raises(ConfigurationError, match=r"process_index=4.*of 4 processes.*\[0, 3\]"):
        check_rank(4, 4)
    with pytest.raises(ConfigurationError, match=r"process_index=-1.*of 4 processes.*\[0, 3\]"):
        check_rank(4, -1)
    with pytest.raises(ConfigurationError, match="num_processes=0"):
        check_rank(0, 0)
