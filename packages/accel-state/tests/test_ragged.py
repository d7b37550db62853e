"""Gathering tensors whose numbers of rows differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accel_state.collectives.torch as collectives_module
from accel_state import PartialState
from accel_state.collectives.header import FIRST_CALLS
from accel_state.errors import DistributedOperationException
from accel_state.operations.ragged import gather_ragged
from accel_state.testing import run_world

LENGTHS = [(4, 4)] * 6 + [(4, 3), (0, 4), (2, 2), (9, 1), (9, 8), (1, 2), (0, 0), (3, 300_000), (4, 4), (4, 3), (3, 4)]


def ragged_calls() -> list[int]:
    """Messages of each call; every call is compared with what the ranks have passed."""
    state = PartialState()
    schedule = state.collectives.schedule
    assert schedule is not None
    messages: list[int] = []
    original = collectives_module._all_gather_flat

    def counting(*args: Any, **kwargs: Any) -> Any:
        messages.append(1)
        return original(*args, **kwargs)

    def values(step: int, rank: int) -> dict[str, torch.Tensor]:
        rows = torch.arange(LENGTHS[step][rank]) + 1000 * rank
        return {"x": rows, "y": rows.to(torch.bool)[:, None].expand(-1, 3), "loss": torch.tensor(step + rank / 8)}

    collectives_module._all_gather_flat = counting
    counts = []
    try:
        for step in range(len(LENGTHS)):
            schedule.next = schedule.calls + 1 + (step > 0)  # a header in the first call only
            messages.clear()
            data = values(step, state.process_index)
            gathered = gather_ragged("test", data, list(data.values()), state.collectives)
            counts.append(len(messages))
            for name, tensor in zip(data, gathered, strict=True):
                parts = [values(step, rank)[name] for rank in range(2)]
                expected = torch.cat(parts) if parts[0].ndim else torch.stack(parts)
                assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), (step, name)
    finally:
        collectives_module._all_gather_flat = original
    return counts


def test_lengths_travel_with_the_rows() -> None:
    """One message a call; another one in the first call, and where a rank has more rows than there was room for."""
    found = run_world(ragged_calls, 2)
    grown, large, after_large = 2, 4, 3  # large tensors have messages of their own
    assert found == [[2, *[1] * 8, grown, 1, 1, 1, large, after_large, 1, 1]] * 2


def different_calls() -> None:
    state = PartialState()
    rows = torch.zeros(4, dtype=torch.int64)
    for _ in range(FIRST_CALLS + 1):
        gather_ragged("test", rows, [rows], state.collectives)
        gather_ragged("test", rows.double(), [rows.double()], state.collectives)
    assert state.collectives.schedule is not None
    state.collectives.schedule.next = state.collectives.schedule.calls + 2
    data = rows.double() if state.process_index else rows
    with pytest.raises(DistributedOperationException, match="the dtypes of the ranks differ"):
        gather_ragged("test", data, [data], state.collectives)


def test_different_dtypes_in_one_message_are_an_error_on_every_rank() -> None:
    run_world(different_calls, 2)


def test_a_process_alone_keeps_its_rows() -> None:
    rows = torch.arange(3)
    assert gather_ragged("test", rows, [rows[:2]], PartialState().collectives)[0].tolist() == [0, 1]
