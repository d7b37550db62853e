"""Runs killed in the middle of a save: the newest complete checkpoint always loads, and the next save works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kill_harness import Plan, kill_at_every_operation, kill_at_random_times, warm_up

from accel_state.testing import run_world

RANDOM_KILLS = 200


def at_every_operation(folder: str, settings: dict[str, Any], victim: int, stride: int) -> list[tuple[int, list[str]]]:
    warm_up(f"{folder}/warm")
    return [
        kill_at_every_operation(Plan(f"{folder}/{torn}", **settings), torn=torn, victim=victim, stride=stride)
        for torn in (False, True)
    ]


def at_random_times(folder: str, settings: dict[str, Any], count: int) -> tuple[int, int, list[str]]:
    warm_up(f"{folder}/warm")
    return kill_at_random_times(Plan(f"{folder}/project", **settings), count, seed=20)


@pytest.mark.slow
@pytest.mark.timeout(900)  # some hundred runs are forked, each of which loads, trains and saves
@pytest.mark.parametrize(
    "settings", [{}, {"blocking": False}, {"replace": True}], ids=["numbered", "in the background", "replacing"]
)
def test_killed_at_every_operation_of_a_save(tmp_path: Path, settings: dict[str, Any]) -> None:
    for kills, leftovers in run_world(at_every_operation, 1, str(tmp_path), settings, 0, 1, timeout=850, state=False)[
        0
    ]:
        # Six files (opened, written, brought to the disk), the manifest, folders, renames and deletions.
        assert kills >= 30 and leftovers == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # as above
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_killed(tmp_path: Path, victim: int) -> None:
    settings = {"world_size": 2, "blocking": bool(victim)}
    for kills, leftovers in run_world(
        at_every_operation, 1, str(tmp_path), settings, victim, 1 if victim else 4, timeout=850, state=False
    )[0]:
        assert kills >= (2 if victim else 8) and leftovers == []


@pytest.mark.slow
@pytest.mark.timeout(900)  # as above
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, RANDOM_KILLS),
        ({"blocking": False}, RANDOM_KILLS // 4),
        ({"world_size": 2, "blocking": False}, RANDOM_KILLS // 20),
    ],
    ids=["one process", "in the background", "two ranks"],
)
def test_killed_at_random_times(tmp_path: Path, settings: dict[str, Any], count: int) -> None:
    kills, saves, leftovers = run_world(at_random_times, 1, str(tmp_path), settings, count, timeout=850, state=False)[0]
    # Some saves get through: the harness also kills late.
    assert kills >= count and saves >= 3 and leftovers == []
