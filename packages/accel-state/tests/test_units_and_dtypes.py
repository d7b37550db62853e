"""Sizes of files and elements."""

from __future__ import annotations

import pytest
import torch

from accel_state import CustomDtype
from accel_state.dtypes import dtype_byte_size
from accel_state.humanize import convert_file_size_to_int


def test_sizes() -> None:
    assert convert_file_size_to_int(7) == 7
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
    with pytest.raises(TypeError, match="'fp32' is not an element type"):
        dtype_byte_size("fp32")  # type: ignore[arg-type]
