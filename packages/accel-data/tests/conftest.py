"""Every test begins with fresh shared states and a known seed; hypothesis uses a fixed profile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from accel_state.context import isolated

settings.register_profile("accel-data", max_examples=80, deadline=None, derandomize=True)
settings.load_profile("accel-data")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with isolated():
        yield
