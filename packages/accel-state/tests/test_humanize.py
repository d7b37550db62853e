"""Sizes in bytes: formatted, parsed, and per element type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import CustomDtype
from accel_state.dtypes import dtype_byte_size
from accel_state.humanize import convert_bytes, convert_file_size_to_int, counted


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (123456789, "117.74 MiB"),
        (5 * 10**12, "4.55 TiB"),
        (10**16, "8.88 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_examples(size, text):
    assert convert_bytes(size) == text


@given(st.integers(0, 2**60))
def test_the_text_is_the_number_to_half_a_percent(size):
    number, unit = convert_bytes(size).split()
    power = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) * 1024**power - size) <= 0.005 * 1024**power + 1e-9 * size
    assert float(number) <= 1024


def test_sizes() -> None:
    assert convert_file_size_to_int(7) == 7
    assert convert_file_size_to_int(18191831040.6) == 18191831040
    sizes = {"1GB": 10**9, "1GiB": 2**30, "2.5MB": 2_500_000, "8Kb": 1000, "10 B": 10, "1tib": 2**40 // 8}
    assert {text: convert_file_size_to_int(text) for text in sizes} == sizes
    for wrong in ("", "GB", "5 apples", "-1GB", "5XB"):
        with pytest.raises(ValueError, match="is not a size"):
            convert_file_size_to_int(wrong)


def test_element_sizes() -> None:
    sizes = {
        torch.float32: 4,
        torch.bfloat16: 2,
        torch.int8: 1,
        torch.float64: 8,
        torch.bool: 0.125,
        torch.float8_e4m3fn: 1,
        torch.complex64: 8,
    }
    assert {dtype: dtype_byte_size(dtype) for dtype in sizes} == sizes
    assert [dtype_byte_size(d) for d in (CustomDtype.INT2, CustomDtype.INT4, CustomDtype.FP8)] == [0.25, 0.5, 1]
    with pytest.raises(TypeError, match="'fp32' is not a dtype"):
        dtype_byte_size("fp32")  # type: ignore[arg-type]


def test_counts() -> None:
    texts = [counted(1, "optimizer"), counted(2, "optimizer"), counted(1, "process"), counted(0, "process")]
    assert texts == ["1 optimizer", "2 optimizers", "1 process", "0 processes"]
