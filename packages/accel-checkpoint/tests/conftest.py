"""Every test starts with fresh shared states and a known seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accel_state import context
from accel_state.testing import preload

# What the ranks of most tests import.
preload("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "accel_checkpoint.api")


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    torch.manual_seed(0)
    with context.isolated():
        yield
