"""The digits example, started in one way or another: whatever starts it, it must learn the same."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

import psutil
import pytest
from forks import run_launched
from workspace import ROOT

SCRIPT = ROOT / "examples" / "digits.py"
# One pass is enough for two runs to differ where a rank reads, averages or steps other than it should.
ARGUMENTS = ("--epochs", "1", "--output_dir", "")
LAUNCH = (sys.executable, "-m", "accel_launch", "launch")
PACKAGES = (
    "accel",
    "accel-bigmodel",
    "accel-checkpoint",
    "accel-data",
    "accel-fp8",
    "accel-launch",
    "accel-monitor",
    "accel-state",
    "accel-track",
)
# Where it suffices that the processes form a group and compute: without an optimizer, which takes as long to import.
# A line is written at once: unbuffered, print writes each of its arguments, and mpirun mixes those of two ranks.
GLOO = """
import torch
import torch.distributed as dist
from accel_state import PartialState
state = PartialState(cpu=True)
value = torch.ones(1) * (state.process_index + 1)
dist.all_reduce(value)
line = f"{state.process_index} {state.num_processes} {state.local_process_index} {value.item()}\\n"
print(line, end="", flush=True)
state.destroy_process_group()
"""
_LOSS = re.compile(r"training loss of the last epoch: (\d+\.\d{6})")


def environment(**further: str) -> dict[str, str]:
    """An environment that nothing of the test run or of the user's settings leaks into."""
    hidden = (
        "ACCELERATE_",
        "TORCHELASTIC_",
        "SLURM_",
        "OMPI_",
        "PMI",
        "PYTEST_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    # The packages as they are here, also for an interpreter that has others of the same names.
    path = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": os.path.join(os.getcwd(), "no-settings"),
        "PYTHONPATH": path,
        **further,
    }


def losses_in(output: str) -> list[float]:
    """Every loss that an output tells."""
    return [float(text) for text in _LOSS.findall(output)]


def is_alive(pid: int) -> bool:
    """Whether a process still runs: a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@cache
def loss_of_one_process() -> float:
    """The loss of the script in one process."""
    pytest.importorskip("sklearn")
    lines = run_launched(SCRIPT, *ARGUMENTS, launch=("--cpu", "--num_processes", 1), folder=Path.cwd())
    (loss,) = losses_in("\n".join(lines))
    return loss


def check_loss(output: str) -> None:
    """Compare the losses in an output (one for each node) with that of one process: sums in another order differ in the
    last digits.
    """
    losses = losses_in(output)
    assert losses and losses == pytest.approx([loss_of_one_process()] * len(losses), abs=1e-4)
