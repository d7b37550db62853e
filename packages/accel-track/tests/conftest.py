"""Every test starts with fresh shared states and a known seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from forks import Processes

from accel_state import context


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    torch.manual_seed(0)
    with context.isolated():
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Runs scripts that log to a library, each in a process of its own that has torch and accel_track already."""
    modules = ("torch", "numpy", "accel_track.tracking", "accel_track.sdk_tracker", "accel_track.jsonl_reader")
    with Processes(*modules) as server:
        yield server
