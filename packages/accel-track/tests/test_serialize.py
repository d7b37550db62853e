"""Conversion of values of any type to plain data."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_track import LoggerType, flatten, to_plain
from accel_track.serialize import MAX_DEPTH, MAX_ELEMENTS, as_number, describe, to_json

np = pytest.importorskip("numpy")


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    path: pathlib.Path = pathlib.Path("a/b")


Point = collections.namedtuple("Point", "x y")


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class BrokenMapping(dict):
    def items(self):
        raise RuntimeError("no items")


class Model:
    def model_dump(self) -> dict:
        return {"a": Color.RED}


CASES = [
    (None, None),
    (True, True),
    (Color.RED, "Color.RED"),
    (Level.HIGH, 3),
    (LoggerType.WANDB, "wandb"),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.array([1, 2]), [1, 2]),
    (np.zeros(MAX_ELEMENTS + 1), f"array(shape=({MAX_ELEMENTS + 1},), dtype=float64)"),
    (torch.tensor(2.5, requires_grad=True), 2.5),
    (torch.tensor([[1, 2]], dtype=torch.bfloat16), [[1.0, 2.0]]),
    (torch.zeros(MAX_ELEMENTS + 1), f"tensor(shape=({MAX_ELEMENTS + 1},), dtype=float32, device=cpu)"),
    (torch.empty(2, device="meta"), "tensor(shape=(2,), dtype=float32, device=meta)"),
    (torch.float16, "float16"),
    (torch.device("cpu"), "cpu"),
    (torch.Size([2, 3]), [2, 3]),
    (pathlib.Path("x") / "y", "x/y"),
    (Settings(), {"lr": 0.1, "path": "a/b"}),
    (Settings, "test_serialize.Settings"),
    (Point(1, {2}), {"x": 1, "y": [2]}),
    (argparse.Namespace(a=1), {"a": 1}),
    (types.SimpleNamespace(a=None), {"a": None}),
    ({3, 1, "b", "a"}, [1, 3, "a", "b"]),
    (frozenset({2.5}), [2.5]),
    (collections.OrderedDict(a=(1, 2)), {"a": [1, 2]}),
    ({1: "int", "1": "text", (1, 2): "tuple", Color.RED: "enum", None: "none"}, None),
    (math.sqrt, "math.sqrt"),
    (torch.nn.functional.relu, "torch.nn.functional.relu"),
    (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
    (torch.nn.ReLU(), "ReLU()"),
    (json, "json"),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (1 + 2j, "(1+2j)"),
    (range(3), "range(0, 3)"),
    (10**30, 10**30),
    (Model(), {"a": "Color.RED"}),
]


@pytest.mark.parametrize(("value", "plain"), CASES, ids=range(len(CASES)))
def test_values_become_plain(value, plain) -> None:
    result = to_plain({"v": value})["v"]
    json.dumps(to_json(result), allow_nan=False)
    if plain is not None or value is None:
        # A test module has another name when it is imported by its path.
        assert result == plain or str(result).endswith(str(plain))


def test_keys_that_become_the_same_text_are_both_kept() -> None:
    assert to_plain({1: "int", "1": "text"}) == {"1": "int", "1 (str)": "text"}
    assert flatten({"a.b": 1, "a": {"b": 2}}) == {"a.b": 1, "a.b_2": 2}
    assert flatten({"a": {}, "b": {"c": {"d": [1]}}}, "/") == {"a": {}, "b/c/d": [1]}


def test_what_contains_itself_ends() -> None:
    loop: dict = {"a": 1}
    loop["self"] = [loop]
    assert to_plain(loop) == {"a": 1, "self": ["<cycle>"]}
    shared = [1]
    assert to_plain([shared, shared]) == [[1], [1]]
    deep: list = []
    for _ in range(MAX_DEPTH + 10):
        deep = [deep]
    assert "[[" in json.dumps(to_plain(deep))


class Bottomless:
    """Makes a new object of itself for every level."""

    def model_dump(self) -> dict:
        return {"next": Bottomless()}


def test_what_never_ends_or_fails_is_described() -> None:
    assert "Bottomless" in json.dumps(to_plain(Bottomless()))
    assert to_plain(Broken()).endswith("Broken>")
    assert to_plain({"a": BrokenMapping(x=1)})["a"] == "{'x': 1}"
    assert len(to_plain(types.MappingProxyType({"a": "x" * 50_000}))["a"]) == 50_000
    assert len(describe("x" * 50_000)) < 11_000


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def test_integers_that_python_does_not_write_are_kept_as_text() -> None:
    """Back ends write JSON, or numbers of 64 bits; the tracker must not be lost to one such value."""
    assert to_plain({"n": 2**10_000, "m": -(2**10_000)}) == {
        "n": f"0x1{'0' * 2500} (10001 bits)",
        "m": f"-0x1{'0' * 2500} (10001 bits)",
    }
    assert as_number(10**400) == math.inf and as_number(-(10**400)) == -math.inf and as_number(2**1023) == 2**1023
    assert to_plain(10**1000) == 10**1000 and len(to_plain(2**10_000_000)) < 11_000


@given(plain_values)
def test_plain_data_stays_as_it_is_and_is_always_json(value) -> None:
    assert repr(to_plain(value)) == repr(value)
    json.loads(json.dumps(to_json(value), allow_nan=False))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *[
            (3, 3),
            (2.5, 2.5),
            (True, 1),
            (torch.tensor([[4]]), 4),
            (np.float64(1.5), 1.5),
            (torch.tensor(True), 1),
            ("1", None),
        ],
        *[
            (None, None),
            (torch.ones(2), None),
            (torch.tensor(1j), None),
            ([1], None),
            (np.array(["x"]), None),
            (np.float16(0.5), 0.5),
        ],
    ],
)
def test_numbers_are_recognised(value, number) -> None:
    assert as_number(value) == number
    assert number is None or type(as_number(value)) in (int, float)


def test_numbers_that_are_not_finite_are_words_in_json() -> None:
    assert to_json({"a": [math.nan, math.inf, -math.inf, 1.0]}) == {"a": ["NaN", "Infinity", "-Infinity", 1.0]}
