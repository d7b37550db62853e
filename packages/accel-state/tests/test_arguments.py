"""Numbers, switches and paths that are given as arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_state import ConfigurationError
from accel_state.arguments import check_flags, check_number
from accel_state.errors import ArgumentTypeError
from accel_state.paths import as_path


@pytest.mark.parametrize("value", [1, 1.5, np.float32(1), np.int64(2), torch.tensor(1.0), torch.tensor([3])])
def test_numbers(value: Any) -> None:
    assert check_number("x", value, at_least=0) == float(value)


@pytest.mark.parametrize("value", ["1", None, True, [1], b"1", torch.ones(2), object()])
def test_what_is_not_a_number(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="x="):
        check_number("x", value)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        *((float("nan"), {}), (float("inf"), {}), (-1, {"at_least": 0}), (0, {"above": 0}), (1, {"below": 1})),
        *((1.5, {"whole": True}), (float("-inf"), {"infinite": True, "at_least": 0})),
    ],
)
def test_bounds(value: float, bounds: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"x={value!r}"):
        check_number("x", value, **bounds)


def test_whole_numbers_stay_exact() -> None:
    assert check_number("x", 2**60 + 1, whole=True) == 2**60 + 1 and check_number("x", 3.0, whole=True) == 3
    assert check_number("x", float("inf"), at_least=0, infinite=True) == float("inf")


@dataclass
class Switches:
    on: bool = True
    maybe: bool | None = None
    number: int = 3


def test_switches() -> None:
    for value in (True, False, 0, 1):
        check_flags(Switches(on=value, maybe=value))  # type: ignore[arg-type]
    check_flags(Switches(number=True))
    for wrong in ("false", None, 2, 1.0, []):
        with pytest.raises(ArgumentTypeError, match="on="):
            check_flags(Switches(on=wrong))  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="maybe='no'"):
        check_flags(Switches(maybe="no"))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["a", "/a/b", Path("a"), "C:/a", "a:b", "a/b:c/d", "~", "a b", "x:"])
def test_paths(value: Any) -> None:
    assert as_path("x", value) == Path(value)


@pytest.mark.parametrize("value", [5, None, b"a", True, [1]])
def test_what_is_not_a_path(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="x="):
        as_path("x", value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a\0b",
        "s3://b/k",
        "gs://b",
        "hdfs:///a",
        "https://h/x",
        "file:" + "///a",
        Path("s3://b/k"),
        "S3://b",
        "az+x://a",
    ],
)
def test_unusable_paths(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="x="):
        as_path("x", value)
