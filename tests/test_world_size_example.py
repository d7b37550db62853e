"""examples/world_size.py: one process ends with the same sha256 as a run killed on four and continued on three."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import ROOT

pytest.importorskip("sklearn")
SCRIPT = ROOT / "examples" / "world_size.py"
DIGEST = re.compile(r"^(\d) ranks, sha256 ([0-9a-f]{16})$", re.MULTILINE)


def run(*words: str, processes: int = 1, fails: bool = False) -> str:
    """What the script prints."""
    launcher = ("-m", "accel_launch", "launch", "--cpu", "--num_processes", str(processes)) if processes > 1 else ()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    command = [sys.executable, *launcher, str(SCRIPT), "--epochs", "2", *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode != 0) == fails, result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow  # three launches, of up to four processes
@pytest.mark.timeout(900)
def test_a_killed_run_continues_on_another_number_of_processes(tmp_path: Path) -> None:
    expected = DIGEST.search(run("--workers", "1"))
    assert expected is not None and expected[1] == "1"
    states = ("--output_dir", str(tmp_path / "states"))
    run(*states, "--die_after", "34", processes=4, fails=True)
    printed = run(*states, processes=3)
    found = DIGEST.search(printed)
    assert "resuming in epoch 1 after 30 optimizer steps" in printed
    assert found is not None and (found[1], found[2]) == ("3", expected[2])
