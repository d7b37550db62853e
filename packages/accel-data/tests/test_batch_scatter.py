"""Splitting batches among ranks, without processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.batch_ops import concat_batches, count_samples, slice_batch
from accel_data.batch_scatter import BatchSplitter, GlobalStep
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


def parts_of_last_step(batches: list[Any], world: int = 2, batch_size: int = 4, **options: Any) -> GlobalStep:
    """The last step of batches that are read without a sampler."""
    splitter = BatchSplitter(world, batch_size=batch_size, **options)
    steps = [(batch, batch is batches[-1], None, -1) for batch in batches]
    *_, (last, padding, _) = splitter.group(iter(steps))
    return splitter.split(last, padding, batches[0])


@dataclass
class Counts:
    tokens: int


class NotComparable:
    """As a data frame of several rows: comparing two gives no truth value."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NotComparable({self.samples})"


VALUES_OF_A_BATCH: dict[str, Callable[[list[int]], Any]] = {
    "int": len,
    "float": lambda samples: sum(samples) / 7,
    "0-d tensor": lambda samples: torch.tensor(sum(samples)),
    "0-d array": lambda samples: np.array(sum(samples)),
    "numpy scalar": lambda samples: np.int64(sum(samples)),
    "weights": lambda samples: torch.arange(3) + sum(samples),
    "array": lambda samples: np.arange(5) * sum(samples),
    "set": set,
    "frozenset": frozenset,
    "range": lambda samples: range(samples[0], samples[-1] + 1),
    "text": str,
    "bytes": bytes,
    "deque": deque,
    "names": lambda samples: ["of", "batch", str(samples)],
    "dictionary": lambda samples: {"inner": {"first": samples[0]}},
    "data class": lambda samples: Counts(sum(samples)),
    "object": lambda samples: SimpleNamespace(samples=samples),
    "arrays of samples": lambda samples: [torch.full((sample,), sample) for sample in samples],
    "type": lambda samples: 1 if len(samples) == 4 else 1.0,
    "optional key": lambda samples: {"complete": True} if len(samples) == 4 else {},
    "not comparable": NotComparable,
    "dtype": lambda samples: torch.zeros((), dtype=torch.float32 if len(samples) == 4 else torch.int64),
}


@pytest.mark.parametrize("length", [14, 10, 15])  # 4 4|4 2; 4 4|2: one batch for two ranks; 4 4|4 3
@pytest.mark.parametrize("kind", VALUES_OF_A_BATCH)
def test_values_of_a_whole_batch_stay_with_its_samples(kind: str, length: int) -> None:
    describe = VALUES_OF_A_BATCH[kind]
    samples = [list(range(i, min(i + 4, length))) for i in range(0, length, 4)]
    batches = [{"value": describe(part), "x": torch.tensor(part)} for part in samples]
    step = parts_of_last_step(batches)
    assert step.ragged
    kept = samples[2:] if len(samples) == 4 else [samples[2], samples[2]]
    for part, own in zip(step.parts, kept, strict=True):
        assert part["x"].tolist() == own
        assert repr(part["value"]) == repr(describe(own))
    assert step.real == [None, None if len(samples) == 4 else 0]


def test_equal_values_of_whole_batches_do_not_prevent_equal_parts() -> None:
    def batch(samples: list[int]) -> dict[str, Any]:
        constant = {"classes": ["a", "b", "c", "d", "e"], "weights": np.ones(5), "scale": torch.tensor(2.0)}
        return {"x": torch.tensor(samples), **constant, "kinds": {"a"}, "title": "all of it", "labels": range(5)}

    step = parts_of_last_step([batch([0, 1, 2, 3]), batch([4, 5, 6, 7]), batch([8, 9, 10, 11]), batch([12, 13])])
    assert [part["x"].tolist() for part in step.parts] == [[8, 9, 10], [11, 12, 13]]
    assert not step.ragged
    assert all(len(part["classes"]) == len(part["weights"]) == 5 for part in step.parts)


def test_arrays_of_samples_are_not_taken_for_arrays_of_batches() -> None:
    # Each sample has as many boxes as its batch has samples.
    batches = [{"x": torch.tensor([i, i]), "boxes": [torch.full((2, 4), i), torch.full((2, 4), i)]} for i in range(6)]
    for part in parts_of_last_step(batches, world=4, batch_size=2).parts:
        assert [box[0, 0] for box in part["boxes"]] == part["x"].tolist()


@pytest.mark.parametrize("value", [torch.arange(6), np.arange(6), list("abcdef")])
def test_a_value_as_long_as_the_joined_batch_is_not_divided(value: Any) -> None:
    batches = [{"x": torch.zeros(size), "classes": value} for size in (4, 4, 4, 2)]
    for part in parts_of_last_step(batches).parts:
        assert list(part["classes"]) == list(value)
    # 5 samples are completed to 6.
    for part in parts_of_last_step([{"x": torch.zeros(size), "classes": value} for size in (4, 4, 4, 1)]).parts:
        assert list(part["classes"]) == list(value)


def test_slices_of_custom_functions_have_values_of_their_samples() -> None:
    batches = [{"x": torch.arange(4) + i, "first": i} for i in (0, 4, 8, 12)]
    step = parts_of_last_step(batches, slice_fn=by_hand)
    assert [(part["x"][0].item(), part["first"]) for part in step.parts] == [(8, 8), (12, 12)]
    no_samples = [{"value": torch.tensor(2)}] * 4
    step = parts_of_last_step(no_samples, slice_fn=by_hand)
    assert ([part["value"].item() for part in step.parts], step.real) == ([2, 2], [None, None])


def test_values_of_samples_come_from_joined_batches_only_on_one_rank() -> None:
    # Trainer repeats the loss for a full batch: a gather on one rank has to know the number of samples.
    step = parts_of_last_step([{"x": torch.zeros(4), "n": 4}, {"x": torch.zeros(2), "n": 2}], world=1)
    assert (step.parts[0]["n"], step.remainder, step.ragged) == (2, 2, False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_one_rank_gets_tensors_that_cannot_be_sent(kind: str) -> None:
    value = torch.eye(2).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    batches = [{"x": torch.zeros(4), "value": torch.eye(4).to_sparse()}, {"x": torch.zeros(2), "value": value}]
    assert parts_of_last_step(batches, world=1).parts == [batches[1]]
    assert parts_of_last_step([{"value": value}], world=1).parts[0]["value"] is value


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
