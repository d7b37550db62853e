"""examples/resume.py, killed at random moments and restarted, ends with the weights of an uninterrupted run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from forks import run_launched
from safetensors.torch import load_file
from workspace import ROOT

SCRIPT = ROOT / "examples" / "resume.py"
RANKS, KILLS = 2, 2

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the data are scikit-learn's")


def check_pages(printed: list[str]) -> None:
    """Killed or not: the lines of all runs on a page are those of one. The weights' last bits are the processor's."""
    epochs = [line for line in printed if line.startswith("epoch ")]
    assert len(epochs) == 4
    for page in ("README.md", "packages/accel/README.md", "docs/guides/checkpoints.md"):
        assert re.findall(r"epoch \d: accuracy 0\.\d{3}", (ROOT / page).read_text(encoding="utf-8")) == epochs, page


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    launch = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num_processes", str(RANKS)]
    return subprocess.Popen(
        [*launch, str(SCRIPT), "--output_dir", str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_tree(process: subprocess.Popen[str]) -> None:
    """``kill -9`` of the launcher, its ranks and their workers, like a power cut."""
    root = psutil.Process(process.pid)
    processes: list[psutil.Process] = []
    while new := [child for child in (root, *root.children(recursive=True)) if child not in processes]:
        for child in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()  # so that it cannot start another process
        processes += new
    for child in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.communicate()
    psutil.wait_procs(processes, timeout=60)


def newest(folder: Path) -> float:
    """The time of the newest entry among the checkpoints; 0 without one."""
    times = [0.0]
    for pattern in ("*", ".*"):
        for entry in (folder / "checkpoints").glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted by the run meanwhile
                times.append(entry.lstat().st_mtime)
    return max(times)


def saved(folder: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return any((folder / "checkpoints").glob("checkpoint_*"))


# Each start imports torch and scikit-learn in three processes.
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_anywhere_ends_with_the_same_weights(tmp_path: Path) -> None:
    launch = ("--cpu", "--num_processes", RANKS)
    check_pages(run_launched(SCRIPT, "--output_dir", tmp_path / "whole", launch=launch, folder=tmp_path))
    dice, kills, folder = random.Random(2), 0, tmp_path / "killed"
    while True:
        run = start(folder)
        before, moment = newest(folder), dice.uniform(0, 1.2)
        # Kill after the first change of this run to its checkpoints, so that every run makes progress and the last one
        # can resume.
        while (
            kills < KILLS
            and run.poll() is None
            and (newest(folder) == before or (kills == KILLS - 1 and not saved(folder)))
        ):
            time.sleep(0.005)
        if kills == KILLS:
            break
        if run.poll() is not None:  # it finished before the kill
            output, _ = run.communicate(timeout=240)
            assert run.returncode == 0, output
            shutil.rmtree(folder)
            kills = 0
            continue
        time.sleep(moment)
        kill_tree(run)
        kills += 1
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert re.search(r"^resuming in epoch \d after \d+ optimizer steps$", output, re.MULTILINE), output
    expected, found = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "killed"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
