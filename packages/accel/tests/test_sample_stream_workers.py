"""A resumed run is handed the rest of what the uninterrupted one was, with worker processes; see
support/sample_streams.py.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from sample_streams import cases, check_all, drawn

from accel_state.testing import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each case forks workers for six loops


@pytest.mark.parametrize("stateful", [False, True])
def test_with_worker_processes(tmp_path: Path, stateful: bool) -> None:
    # In a process of its own: torch's queues now and then lose a race when many loaders with workers come and go in one
    # process.
    found = drawn(cases(world=1, workers=2, stateful=stateful), 8)
    assert [*chain(*run_world(check_all, 1, found, str(tmp_path), timeout=560))] == []


def test_on_two_ranks_with_worker_processes(tmp_path: Path) -> None:
    found = drawn(cases(2, 2), 5)
    assert [*chain(*run_world(check_all, 2, found, str(tmp_path), timeout=560))] == []
