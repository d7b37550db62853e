"""Isolates the tests from each other: fresh states and a fixed seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accel_state import context
from accel_state.testing import preload

# The model that several files of tests share.
sys.path.insert(0, str(Path(__file__).parent))

# For the real runs that plans are compared with: a server imports this once, and ranks are forked from it.
preload(
    "accel.accelerator",
    "accel.strategies.mesh_pp",
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    torch.manual_seed(0)
    with context.isolated():
        yield
