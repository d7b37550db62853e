"""Splitting batches among ranks, without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.batch_ops import concat_batches, count_samples, slice_batch
from accel_data.batch_scatter import BatchSplitter
from accel_data.lookahead import Step

flags = st.booleans()


def batch_of(samples: list[int]) -> dict[str, Any]:
    return {
        "x": torch.tensor(samples, dtype=torch.int64),
        "names": [f"sample {i}" for i in samples],
        "pair": (
            torch.tensor([[i, i] for i in samples], dtype=torch.int64).view(-1, 2),
            np.array(samples, dtype=np.int64),
        ),
        "records": [{"id": i} for i in samples],
        "scale": torch.tensor(2.0),
        "title": "all of it",
    }


def ids(batch: Any) -> list[int]:
    samples = batch["x"].tolist()
    assert batch["names"] == [f"sample {i}" for i in samples]
    assert batch["pair"][0].tolist() == [[i, i] for i in samples]
    assert batch["pair"][1].tolist() == samples
    assert [record["id"] for record in batch["records"]] == samples
    assert (batch["scale"].item(), batch["title"]) == (2.0, "all of it")
    return samples


def steps_of(sizes: list[int]) -> list[Step]:
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [(batch_of(list(range(bounds[i], bounds[i + 1]))), i == len(sizes) - 1, None, -1) for i in range(len(sizes))]


@given(
    sizes=st.lists(st.integers(1, 5), max_size=9),
    fixed=flags,
    world=st.integers(1, 4),
    split=flags,
    even=flags,
    sliced=flags,
)
def test_rounds_put_together_are_what_was_read(
    sizes: list[int], fixed: bool, world: int, split: bool, even: bool, sliced: bool
) -> None:
    if fixed:
        sizes = [4 * world] * (len(sizes) - 1) + sizes[-1:]
    splitter = BatchSplitter(
        world, split, 4 * world if fixed else None, even_batches=even, slice_fn=by_hand if sliced else None
    )
    seen: list[int] = []
    first: Any = None
    ends = []
    for batches, padding, last in splitter.group(iter(steps_of(sizes))):
        first = batches[0] if first is None else first
        round_ = splitter.split(batches, padding, first)
        lengths = [len(ids(part)) for part in round_.parts]
        assert len(lengths) == world
        assert all(lengths)
        if not round_.ragged:
            assert len(set(lengths)) == 1
            together = [i for part in round_.parts for i in ids(part)]
            assert round_.remainder == -1 or last
            seen += together if round_.remainder < 0 else together[: round_.remainder]
        else:
            for part, real in zip(round_.parts, round_.real, strict=True):
                seen += ids(part)[:real]
        if fixed and even:
            assert not round_.ragged
        ends.append(last)
    assert seen == list(range(sum(sizes)))
    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


def by_hand(batch: Any, piece: slice, process_index: int, num_processes: int) -> Any:
    assert 0 <= process_index < num_processes
    return slice_batch(batch, piece.start, piece.stop)


@given(count=st.integers(0, 9), world=st.integers(1, 4))
def test_dropping_what_does_not_fill_a_round(count: int, world: int) -> None:
    splitter = BatchSplitter(world, batch_size=2, drop_last=True)
    rounds = list(splitter.group(iter(steps_of([2] * count))))
    assert [len(batches) for batches, _, _ in rounds] == [world] * (count // world)
    assert [last for _, _, last in rounds] == [False] * (count // world - 1) + [True] * bool(count // world)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_joining_and_slicing_are_inverse(sizes: list[int]) -> None:
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = [batch_of(list(range(bounds[i], bounds[i + 1]))) for i in range(len(sizes))]
    joined = concat_batches(batches)
    assert ids(joined) == list(range(bounds[-1]))
    for i in range(len(sizes)):
        assert ids(slice_batch(joined, bounds[i], bounds[i + 1])) == list(range(bounds[i], bounds[i + 1]))


def test_rows_of_batches_without_arrays() -> None:
    assert count_samples(["a", "b", "c"]) == 3
    assert count_samples({"text": ["a", "b"], "n": 1}) == 2
    assert count_samples(torch.tensor(1.0)) is None
    assert count_samples("text") is None
    assert slice_batch(["a", "b", "c"], 1, 3) == ["b", "c"]
    assert concat_batches([["a"], ["b", "c"]]) == ["a", "b", "c"]


def test_what_has_no_entry_per_sample_comes_from_the_first_batch() -> None:
    one = {"x": torch.tensor([0, 1]), "scale": torch.tensor(1.0), "classes": ["a", "b", "c"], "title": "one"}
    other = {"x": torch.tensor([2]), "scale": torch.tensor(2.0), "classes": ["d", "e", "f"], "title": "other"}
    joined = concat_batches([one, other])
    assert joined.pop("x").tolist() == [0, 1, 2]
    assert joined == {"scale": torch.tensor(1.0), "classes": ["a", "b", "c"], "title": "one"}


def test_values_are_joined_by_key_and_not_by_position() -> None:
    batches = [{"x": torch.tensor([1]), "y": torch.tensor([5])}, {"y": torch.tensor([6]), "x": torch.tensor([2])}]
    joined = concat_batches(batches)
    assert (joined["x"].tolist(), joined["y"].tolist()) == ([1, 2], [5, 6])
    for keys in ("x",), ("x", "z"), ("x", "y", "z"):
        with pytest.raises(ValueError, match="different keys"):
            concat_batches([{"x": torch.zeros(1), "y": torch.zeros(1)}, {key: torch.zeros(1) for key in keys}])


def test_what_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="shorter"):
        concat_batches([(torch.zeros(1), torch.ones(1)), (torch.zeros(1),)])
    with pytest.raises(ValueError, match="first dimension"):
        concat_batches([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="different structures"):
        concat_batches([torch.zeros(2), [1, 2]])
