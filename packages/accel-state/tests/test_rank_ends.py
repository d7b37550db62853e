"""The launcher that a variable names, and the notes that ranks leave for it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from accel_state import rank_ends
from accel_state.rank_ends import Launch, RankFile


def test_a_rank_finds_its_launcher_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rank starts afterwards does not belong to the launch."""
    launch = Launch.of_this_process(tmp_path)
    assert launch.began == pytest.approx(psutil.Process().create_time(), abs=2)
    monkeypatch.setenv(rank_ends.VARIABLE, launch.encode())
    rank_ends.launch.cache_clear()
    try:
        assert rank_ends.launch() == rank_ends.launch() == launch
        assert rank_ends.VARIABLE not in os.environ
    finally:
        rank_ends.launch.cache_clear()


def test_the_note_of_a_restarted_rank_replaces_the_one_before(tmp_path: Path) -> None:
    launch = Launch.of_this_process(tmp_path)
    for name in ("killed", "restarted"):
        launch.write_note(RankFile(str(tmp_path / "rank-00001.jsonl"), name, 0.0))
    (note,) = map(rank_ends.read_note, tmp_path.iterdir())
    assert note is not None and note.id == "restarted"
    Launch("elsewhere", 0.0, str(tmp_path / "of another machine")).write_note(note)
    assert len(list(tmp_path.iterdir())) == 1
