"""Dividing inputs: an exact partition, whatever the length and the world."""

from __future__ import annotations

from collections import deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import PartialState
from accel_state.splitting import share_bounds, share_of
from accel_state.testing import run_world

Columns = namedtuple("Columns", "ids names")


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_partition_exactly_and_differ_by_one_at_most(length: int, world: int) -> None:
    bounds = [share_bounds(length, rank, world) for rank in range(world)]
    assert [i for start, end in bounds for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("kind", ["list", "tuple", "tensor", "matrix", "array", "dict", "columns", "dataset", "deque"])
@given(length=st.integers(1, 50), world=st.integers(1, 9))
def test_padded_shares_are_equally_long_and_repeat_the_last_input(kind: str, length: int, world: int) -> None:
    shares = [as_list(share_of(make(kind, length), rank, world, apply_padding=True)) for rank in range(world)]
    assert {len(share) for share in shares} == {-(-length // world)}
    flat = [item for share in shares for item in share]
    assert sorted(set(flat)) == list(range(length)) and all(item == length - 1 for item in padding_of(flat, length))
    exact = [item for rank in range(world) for item in as_list(share_of(make(kind, length), rank, world))]
    assert exact == list(range(length))


def padding_of(flat: list[int], length: int) -> list[int]:
    rest = list(flat)
    for item in range(length):
        rest.remove(item)
    return rest


def make(kind: str, length: int) -> Any:
    items = list(range(length))
    return {
        "list": lambda: items,
        "tuple": lambda: tuple(items),
        "tensor": lambda: torch.arange(length),
        "matrix": lambda: torch.arange(length)[:, None].expand(length, 3),
        "array": lambda: np.arange(length),
        "dict": lambda: {"ids": torch.arange(length), "inner": {"names": items}},
        "columns": lambda: Columns(np.arange(length), items),
        "dataset": lambda: torch.utils.data.TensorDataset(torch.arange(length)),
        "deque": lambda: deque(items),  # a sequence without slices
    }[kind]()


def as_list(share: Any) -> list[int]:
    if isinstance(share, dict):
        assert list(share["ids"]) == share["inner"]["names"]
        return share["inner"]["names"]
    if isinstance(share, Columns):
        assert list(share.ids) == share.names
        return share.names
    if isinstance(share, torch.utils.data.Dataset):
        return [int(share[i][0]) for i in range(len(share))]  # type: ignore[arg-type]
    if isinstance(share, torch.Tensor) and share.ndim == 2:
        assert (share == share[:, :1]).all() and share.shape[1] == 3
        return share[:, 0].tolist()
    return [int(item) for item in share]


class Indexed:
    """Has a length and items, and is no sequence."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Table(Indexed):
    """Selects rows as data sets of Hugging Face do."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def select(self, indices: list[int]) -> Table:
        return Table([self.rows[i] for i in indices])


def test_a_data_set_that_selects_rows_keeps_its_type() -> None:
    share = share_of(Table([10, 11, 12]), 1, 2, apply_padding=True)
    assert type(share) is Table and share.rows == [12, 12]


def three_prompts() -> tuple[Any, ...]:
    state = PartialState()
    with state.split_between_processes(["a dog", "a cat", "a chicken"]) as exact:
        pass
    with state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=True) as padded:
        pass
    with state.split_between_processes(["only one"]) as few:
        pass
    return exact, padded, few


def test_three_prompts_over_two_ranks() -> None:
    assert run_world(three_prompts, 2) == [
        (["a dog", "a cat"], ["a dog", "a cat"], ["only one"]),
        (["a chicken"], ["a chicken", "a chicken"], []),
    ]


def test_what_cannot_be_split_is_refused() -> None:
    for wrong in ("text", 3, {1, 2}, (x for x in "ab"), None):
        with pytest.raises(TypeError, match=f"cannot split a {type(wrong).__name__}"):
            share_of(wrong, 0, 2)
    with pytest.raises(TypeError, match="0-dimensional"):
        share_of(torch.tensor(1), 0, 2)
    with pytest.raises(ValueError, match=r"\{'a': 2, 'b': 3\}"):
        share_of({"a": [1, 2], "b": [1, 2, 3]}, 0, 2)
    with pytest.raises(ValueError, match="no last input to repeat"):
        share_of([], 0, 2, apply_padding=True)
    with pytest.raises(ValueError, match="no last input to repeat"):
        share_of({}, 0, 2, apply_padding=True)
    with pytest.raises(TypeError, match="cannot take single items from a Indexed"):
        share_of(Indexed(), 0, 2)
    assert share_of([], 1, 2) == [] and share_of([], 0, 1, apply_padding=True) == []
