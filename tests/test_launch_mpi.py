"""mpirun of Open MPI and of MPICH, started by ``accel launch`` and starting it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from components import torchless
from components.digits import ARGUMENTS, GLOO, LAUNCH, SCRIPT, check_loss, environment, is_alive

# Each starts mpirun, and with it two ranks, once or twice.
pytestmark = [pytest.mark.component, pytest.mark.timeout(700)]

SUM = """
import os, sys, time
from torchless import Group
group = Group()
rank, size = group.rank, group.sum(1)
if "fail" in sys.argv and rank == 1:
    raise ValueError("no such file: labels.csv")
if "exit" in sys.argv and rank == 1:
    sys.exit(7)
if "kill" in sys.argv and rank == 1:
    os.kill(os.getpid(), 9)
if "sleep" in sys.argv:
    with open(f"pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300)
names = ("LOCAL_RANK", "CCL_WORKER_COUNT", "OMP_NUM_THREADS", "KMP_BLOCKTIME", "ACCELERATE_MIXED_PRECISION")
values = (rank, size, *(os.environ.get(name, "-") for name in names), *sys.argv[1:])
print(" ".join(map(str, values)) + "\\n", end="", flush=True)
group.sum(0)
"""
KINDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            shutil.which(f"mpirun.{name}") is None, reason=f"mpirun.{name} is not installed: scripts/components mpi"
        ),
    )
    for name in ("openmpi", "mpich")
]


@pytest.fixture(params=KINDS)
def mpi(request, tmp_path) -> tuple[str, dict[str, str]]:
    """The name of an MPI, and an environment with its mpirun on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # A script, since a symbolic link would change how Hydra finds its helpers.
    mpirun = folder / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nexec {shutil.which(f"mpirun.{request.param}")} "$@"\n')
    mpirun.chmod(0o755)
    (tmp_path / "s.py").write_text(SUM)
    torchless.copy_to(tmp_path)
    (tmp_path / "hosts").write_text("localhost\n")
    return request.param, environment(PATH=os.pathsep.join([str(folder), os.environ["PATH"]]))


def run(mpi, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    # mpirun may cut what ranks write within a character.
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=mpi[1],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )


MPIRUN = (*LAUNCH, "--cpu", "--num_processes", "2", "--mpirun_hostfile", "hosts")


def test_accel_launch_starts_mpirun(mpi, tmp_path) -> None:
    words = ("--mpirun_ccl", 2, "--num_cpu_threads_per_process", 3, "--mixed_precision", "bf16")
    result = run(mpi, tmp_path, *MPIRUN, *words, "s.py", "a b", "$HOME")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{rank} 2 {rank} 2 3 1 bf16 a b $HOME" for rank in (0, 1)]


@pytest.mark.slow  # three failures under each mpirun; test_the_first_report_is_printed_last is fast
@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("fail", 1, "rank 1 of 2 failed first (local rank 1 on "),
        ("exit", 7, "rank 1 of 2 ended first with exit code 7 (local rank 1 on "),
        ("kill", 137, "rank 1 of 2 was ended by SIGKILL (local rank 1 on "),
    ],
)
def test_the_rank_that_failed_first_is_named_last(mpi, tmp_path, how, code, says) -> None:
    result = run(mpi, tmp_path, *MPIRUN, "s.py", how)
    end = result.stderr[result.stderr.rindex("accel launch: ") :]
    assert end.startswith(f"accel launch: {says}"), result.stderr
    assert how != "fail" or end.endswith("ValueError: no such file: labels.csv\n")
    assert result.returncode == code and "accel-launch-failure" not in result.stderr


def test_mpirun_starts_accel_launch(mpi, tmp_path) -> None:
    """As in ``mpirun -n 16 -ppn 4 accel launch script.py``: each launcher is a rank."""
    root = ["--allow-run-as-root", "--oversubscribe"] if mpi[0] == "openmpi" else []
    result = run(mpi, tmp_path, "mpirun", *root, "-np", 2, *LAUNCH, "--cpu", "s.py")
    assert result.returncode == 0, result.stderr
    assert [line[:5] for line in sorted(result.stdout.splitlines())] == ["0 2 0", "1 2 1"]
    result = run(mpi, tmp_path, "mpirun", *root, "-np", 2, *LAUNCH, "--cpu", "--num_processes", 5, "s.py")
    assert result.returncode and "--num_processes 5, but " in result.stderr


@pytest.mark.slow  # starts ranks with each mpirun; signals have fast tests without one
@pytest.mark.timeout(700)
def test_a_signal_ends_the_ranks(mpi, tmp_path) -> None:
    launcher = subprocess.Popen(
        [*MPIRUN, "s.py", "sleep"], cwd=tmp_path, env=mpi[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        deadline = time.monotonic() + 150
        while not all(file.exists() and file.read_text() for file in files):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(100) == 143
        deadline = time.monotonic() + 60
        for file in files:
            pid = int(file.read_text())
            while is_alive(pid):
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.slow  # trains under each mpirun; test_the_demo_learns_the_digits is fast, without one
@pytest.mark.timeout(1000)
def test_the_digits_example_learns_the_same(mpi, tmp_path) -> None:
    check_loss(run(mpi, tmp_path, *MPIRUN, SCRIPT, *ARGUMENTS).stdout)


@pytest.mark.slow  # ranks import torch; the environments of jobs have fast tests in accel-state
def test_ranks_that_mpirun_starts_by_itself_need_no_launcher(mpi, tmp_path) -> None:
    (tmp_path / "gloo.py").write_text(GLOO)
    root = ["--allow-run-as-root", "--oversubscribe"] if mpi[0] == "openmpi" else []
    # Through a shell, as users start it: the process manager is then not the parent.
    words = ("sh", "-c", f"{sys.executable} gloo.py; true")
    result = run(mpi, tmp_path, "mpirun", *root, "-np", 2, *words)
    assert sorted(result.stdout.splitlines()) == ["0 2 0 3.0", "1 2 1 3.0"], result.stderr
