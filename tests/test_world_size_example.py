"""examples/world_size.py: one process ends with the same sha256 as a run killed on four and continued on three."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from forks import run_launched
from workspace import ROOT

from accel_state.testing import WorldError

SCRIPT = ROOT / "examples" / "world_size.py"
DIGEST = re.compile(r"(\d) ranks, sha256 ([0-9a-f]{16})")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the data are scikit-learn's")


def run(folder: Path, *words: object, processes: int = 1) -> list[str]:
    """The lines that the script prints."""
    launch = ("--cpu", "--num_processes", processes)
    return run_launched(SCRIPT, "--epochs", 2, *words, launch=launch, folder=folder)


@pytest.mark.slow  # three trainings, on up to four ranks
@pytest.mark.timeout(900)
def test_a_killed_run_continues_on_another_number_of_processes(tmp_path: Path) -> None:
    expected = DIGEST.fullmatch(run(tmp_path, "--workers", 1)[-1])
    assert expected is not None and expected[1] == "1"
    states = ("--output_dir", tmp_path / "states")
    with pytest.raises(WorldError, match="died of SIGKILL"):
        run(tmp_path, *states, "--die_after", 34, processes=4)
    printed = run(tmp_path, *states, processes=3)
    found = DIGEST.fullmatch(printed[-1])
    assert "resuming in epoch 1 after 30 optimizer steps" in printed
    assert found is not None and (found[1], found[2]) == ("3", expected[2])
