"""Every test begins with a known seed, whatever ran before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def known_seed() -> None:
    torch.manual_seed(0)
