"""Sums over the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from accel.core.checksum import sum_of_bits

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128, torch.bool)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_a_change_of_any_value_changes_the_sum(kind: torch.dtype, start: int, length: int) -> None:
    tensor = torch.ones(start + length).to(kind)[start:]
    before = sum_of_bits(tensor)
    assert torch.equal(before, sum_of_bits(tensor.clone()[:]))
    for position in range(length):
        tensor[position] = 0
        assert sum_of_bits(tensor) != before
        tensor[position] = 1
    assert sum_of_bits(tensor) == before


def test_it_is_the_sum_of_the_bits_modulo_two_to_the_64() -> None:
    assert sum_of_bits(torch.tensor([1, 0, 5], dtype=torch.int32)).item() == 1 + 5
    assert sum_of_bits(torch.tensor([1, 2, 5], dtype=torch.int32)).item() == 1 + (2 << 32) + 5
    assert sum_of_bits(torch.full((2,), 1 << 62)).item() == -(1 << 63)
    assert sum_of_bits(torch.arange(6, dtype=torch.int64).view(2, 3).T).item() == 15
    assert sum_of_bits(torch.empty(0)).item() == 0
