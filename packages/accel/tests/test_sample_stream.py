"""A resumed run is handed the rest of what the uninterrupted one was, without worker processes; see
support/sample_streams.py.
"""

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a hundred runs and more, each saved, loaded and run again


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stateful", [False, True])
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_in_one_process(tmp_path: Path, data: Any, stateful: bool) -> None:
    case = data.draw(cases(world=1, workers=0, stateful=stateful))
    with context.isolated():
        assert check(case, tmp_path) == []


@pytest.mark.parametrize(("world", "count"), [(2, 60), (4, 30)])
def test_on_several_ranks(tmp_path: Path, world: int, count: int) -> None:
    found = drawn(cases(world, 0), count) + drawn(cases(world, 0, stateful=True), count // 4)
    assert [*chain(*run_world(check_all, world, found, str(tmp_path), timeout=560))] == []
