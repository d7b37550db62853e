"""Every test starts with states of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_state import context


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    with context.isolated():
        yield
