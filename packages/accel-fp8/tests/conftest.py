"""Every test begins with a known seed."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def known_seed() -> None:
    torch.manual_seed(0)
