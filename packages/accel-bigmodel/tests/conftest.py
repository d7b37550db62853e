"""Every test begins with fresh shared states and a known seed, on one thread; hypothesis stays within the time of the
suite.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from accel_state.context import isolated

# The models that several files of tests share.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("accel-bigmodel", max_examples=80, deadline=None, derandomize=True)
settings.load_profile("accel-bigmodel")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    random.seed(0)
    torch.manual_seed(0)
    with isolated():
        yield
