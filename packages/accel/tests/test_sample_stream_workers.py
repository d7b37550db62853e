"""A resumed run is handed the rest of what the uninterrupted one was, with worker processes; see support/sample_streams.py."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_streams import cases, check, check_all, drawn

from accel_state import context
from accel_state.testing import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stateful", [False, True])
@settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_with_worker_processes(tmp_path: Path, data: Any, stateful: bool) -> None:
    case = data.draw(cases(world=1, workers=2, stateful=stateful))
    with context.isolated():
        assert check(case, tmp_path) == []


def test_on_two_ranks_with_worker_processes(tmp_path: Path) -> None:
    found = drawn(cases(2, 2), 5)
    assert [*chain(*run_world(check_all, 2, found, str(tmp_path), timeout=100))] == []
