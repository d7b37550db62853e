"""Every test starts with fresh shared states and a known seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accel_state import context

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    torch.manual_seed(0)
    with context.isolated():
        yield
