"""The ledger of accel-monitor covers a launch from exec to exit, whichever launcher starts the ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from components import slurm
from components.digits import LAUNCH, environment

from accel_monitor import make_ledger, read_runs
from accel_monitor.report import report

pytestmark = [pytest.mark.component, pytest.mark.timing, pytest.mark.timeout(560)]  # times of launchers themselves

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator

accelerator = Accelerator(cpu=True, project_dir=".")
number = int(os.environ.get("ACCELERATE_FT_REPLICA", accelerator.process_index))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
killed = Path("killed")
for step, (x,) in enumerate(loader):
    if "kill" in sys.argv and number == 1 and step == 10 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)
    accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2)
accelerator.end_training()
"""
TIMED = """
import json, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.call(sys.argv[1:])
json.dump([time.perf_counter() - begin, code], open("timed", "w"))
"""
TWO_RANKS = ("--cpu", "--num_processes", "2", "--monitor")


def missing(program: str, component: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed: scripts/components {component}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


LAUNCHERS = [
    pytest.param((), TWO_RANKS, id="elastic"),
    pytest.param(
        (),
        ("--cpu", "--ft", "--num_replicas", "2", "--monitor"),
        id="ft",
        marks=pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed"),
    ),
    pytest.param((), (*TWO_RANKS, "--mpirun_hostfile", "hosts"), id="mpirun", marks=missing("mpirun", "mpi")),
    pytest.param(
        ("salloc", "-N2", "-n2"),
        TWO_RANKS,
        id="srun",
        marks=pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "SLURM is installed"),
    ),
]


@pytest.fixture
def variables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a launch, with a running cluster for SLURM."""
    with ExitStack() as stack:
        is_slurm = "srun" in request.node.callspec.id
        cluster = stack.enter_context(slurm.Slurm(tmp_path_factory.mktemp("slurm"))).env if is_slurm else {}
        yield environment(**cluster, GLOO_SOCKET_IFNAME="lo")


@pytest.mark.parametrize("killed", [False, True], ids=["finished", "killed"])
@pytest.mark.parametrize(("allocation", "options"), LAUNCHERS)
def test_every_second_of_a_launch_has_a_cause(
    allocation: tuple[str, ...], options: tuple[str, ...], killed: bool, variables: dict[str, str], tmp_path: Path
) -> None:
    for name, text in {"train.py": SCRIPT, "timed.py": TIMED, "hosts": "localhost\n"}.items():
        (tmp_path / name).write_text(text)
    words = [*allocation, sys.executable, "timed.py", *LAUNCH, *options, "train.py", *["kill"] * killed]
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, timeout=500, check=False)
    assert (tmp_path / "timed").exists(), done.stderr
    seconds, code = json.loads((tmp_path / "timed").read_text())
    # Only replicas are started again.
    assert bool(code) == (killed and "--ft" not in options), done.stderr
    (run,) = read_runs(tmp_path)
    ledger = make_ledger(run)
    print("\n".join(report(ledger)), f"\n{seconds:.2f} s from exec to exit")
    assert (tmp_path / "killed").exists() == killed and len(ledger.entries) == 2
    for entries in ledger.entries.values():
        known = sum(sum(entry.seconds.values()) for entry in entries)
        print(f"{known:.2f} s have a cause ({known / seconds - 1:+.2%})")
        assert known == pytest.approx(seconds, rel=0.01, abs=0.3)
