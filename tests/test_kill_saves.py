"""Some of the kills of benchmarks/kill_saves.py: on a file system, and on an S3 server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from accel_state.testing import run_world

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import kill_saves


def killed(place: str, background: bool, kills: int, copies: str = "") -> int:
    torch.set_num_threads(1)
    schedule = kill_saves.Schedule(place, 20_000, background, copies)
    kill_saves.run(schedule, kills, seed=3)
    return schedule.newest + schedule.in_the_middle


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("background", "kills"), [(False, 7), (True, 2)])
def test_on_a_file_system(tmp_path: Path, background: bool, kills: int) -> None:
    assert run_world(killed, 1, str(tmp_path / "place"), background, kills, timeout=550, state=False)[0] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_server() -> None:
    with kill_saves.store() as place:
        assert run_world(killed, 1, place, False, 5, timeout=550, state=False)[0] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_copies_on_a_server(tmp_path: Path) -> None:
    with kill_saves.store() as place:
        assert run_world(killed, 1, str(tmp_path / "place"), False, 3, place, timeout=550, state=False)[0] > 0


def test_states_of_steps_differ() -> None:
    states = [kill_saves.state_of(step, 20) for step in (1, 1, 2)]
    assert kill_saves.same(states[0], states[1]) and not kill_saves.same(states[0], states[2])
    states[1]["averages"][1][3] += 1
    assert not kill_saves.same(states[0], states[1])
