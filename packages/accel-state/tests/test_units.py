"""Bytes for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.humanize import convert_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (123456789, "117.74 MB"),
        (5 * 10**12, "4.55 TB"),
        (10**16, "8.88 PB"),
        (-2048, "-2.0 KB"),
    ],
)
def test_examples(size, text):
    assert convert_bytes(size) == text


@given(st.integers(0, 2**60))
def test_the_text_is_the_number_to_half_a_percent(size):
    number, unit = convert_bytes(size).split()
    power = ["bytes", "KB", "MB", "GB", "TB", "PB"].index(unit)
    assert abs(float(number) * 1024**power - size) <= 0.005 * 1024**power + 1e-9 * size
    assert float(number) <= 1024
