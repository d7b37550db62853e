"""Ranks that were started with different settings."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from accel import Accelerator
from accel_state import ConfigurationError, PartialState
from accel_state.testing import run_world


def _make(variables: dict[str, str], count: int) -> list[str]:
    """Make Accelerators on each rank, the last with these variables on rank 1 only; return the errors."""
    errors: list[str] = []
    kept: list[Any] = []
    for number in range(count):
        if PartialState().process_index == 1 and number == count - 1:
            os.environ.update(variables)
        try:
            kept.append(Accelerator(cpu=True))
        except ConfigurationError as error:
            errors.append(str(error))
    dist.barrier()
    return errors


@pytest.mark.parametrize(
    ("variables", "here", "there"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision='bf16'", "mixed_precision='no'"),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "gradient_accumulation_steps=4",
            "gradient_accumulation_steps=1",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "strategy='FSDP1Strategy'", "strategy='DDPStrategy'"),
    ],
    ids=["precision", "accumulation", "strategy"],
)
def test_ranks_with_different_settings_are_refused(variables: dict[str, str], here: str, there: str) -> None:
    errors = run_world(_make, 2, variables, 1)
    # The rank that comes second raises, whichever that is.
    [message] = [message for of_rank in errors for message in of_rank]
    assert message.startswith((f"rank 1 has {here}, and rank 0 has {there}.", f"rank 0 has {there}, and rank 1 has"))


def test_equal_settings_and_later_accelerators_are_not_compared() -> None:
    assert run_world(_make, 2, {}, 1) == [[], []]
    assert run_world(_make, 2, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 2) == [[], []]
