"""``accel launch`` in a SLURM cluster of two nodes, which runs on this machine: no flag gives addresses or ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from components import slurm, torchless
from components.digits import ARGUMENTS, GLOO, LAUNCH, SCRIPT, check_loss, environment, is_alive

from accel_state.environments.slurm import expand_hosts

# Most start several jobs one after the other, with agents that import torch on each node.
pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "SLURM is installed"),
    pytest.mark.timeout(960),
]

SUM = """
import os, sys, time
from torchless import Group
group = Group()
if "sleep" in sys.argv:
    with open(f"pid{group.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300)
print(group.rank, group.sum(1), os.environ["SLURMD_NODENAME"], os.environ["LOCAL_RANK"], flush=True)
group.sum(0)
if "fail" in sys.argv and group.rank == 1:
    raise ValueError("no such file: labels.csv")
group.sum(0)
"""
CPU = (*LAUNCH, "--cpu")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def run(cluster, tmp_path):
    (tmp_path / "s.py").write_text(SUM)
    torchless.copy_to(tmp_path)

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        # Both nodes are this machine, whose name need not be resolvable.
        env = environment(**cluster.env, GLOO_SOCKET_IFNAME="lo")
        # srun may cut what ranks write to stderr within a character.
        return subprocess.run(
            list(map(str, words)),
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            check=False,
        )

    return call


def lines(result: subprocess.CompletedProcess[str], code: int = 0) -> list[str]:
    assert result.returncode == code, result.stdout + result.stderr
    return sorted(line for line in result.stdout.splitlines() if line[:1].isdigit())


def batch(
    run, folder: Path, *options: str, words: tuple[str, ...] = CPU, script: str = "s.py"
) -> subprocess.CompletedProcess[str]:
    """Submit a batch script whose only command is ``accel launch``, and return what it printed."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{' '.join(words)} {script}\n")
    submitted = run("sbatch", "--wait", "-o", "out", "-e", "err", *options, "job.sh")
    return subprocess.CompletedProcess(
        [], submitted.returncode, (folder / "out").read_text(), (folder / "err").read_text()
    )


TWO_NODES = ["0 2 n1 0", "1 2 n2 0"]
FOUR_RANKS = ["0 4 n1 0", "1 4 n1 1", "2 4 n2 0", "3 4 n2 1"]
# SLURM chooses the node: n2 while n1 is still cleaning up the previous job.
ONE_NODE = [[f"{rank} 2 {node} {rank}" for rank in range(2)] for node in ("n1", "n2")]


@pytest.mark.slow  # a job of SLURM; job environments have fast tests in test_launch_context
def test_a_launcher_on_each_node(run) -> None:
    # Without a number of processes: as salloc starts the launchers, below.
    assert lines(run("srun", "-N2", "-n2", *CPU, "--num_processes", 4, "s.py")) == FOUR_RANKS


@pytest.mark.slow  # three jobs of SLURM; job environments have fast tests in test_launch_context
def test_a_launcher_for_each_rank(run) -> None:
    assert lines(run("srun", "-N1", "-n2", *CPU, "s.py")) in ONE_NODE
    result = run("srun", "-N1", "-n2", *CPU, "s.py", "fail")
    assert result.returncode == 1
    assert "accel launch: rank 1 of 2 failed (local rank 1 on " in result.stderr
    result = run("srun", "-N1", "-n2", *CPU, "--num_processes", 3, "s.py")
    assert (
        result.returncode == 2 and "--num_processes 3, but slurm started 2 launchers, 2 on this node" in result.stderr
    )


# sbatch itself polls every ten seconds whether a job has ended.
@pytest.mark.slow
@pytest.mark.timeout(960)
def test_a_batch_script_without_srun(run, tmp_path) -> None:
    assert lines(batch(run, tmp_path, "-N2")) == TWO_NODES
    assert lines(batch(run, tmp_path, "-N2", "--ntasks-per-node=2")) == FOUR_RANKS
    assert lines(batch(run, tmp_path, "-N1", "-n2")) in ONE_NODE


@pytest.mark.slow  # two allocations of SLURM; test_a_dry_run_starts_nothing makes one in the fast tier
def test_an_interactive_allocation(run) -> None:
    """The shell may run outside of the allocated nodes. The first failure of all nodes comes last."""
    assert lines(run("salloc", "-N1", *CPU, "--num_processes", 2, "s.py")) in ONE_NODE
    result = run("salloc", "-N2", *CPU, "s.py", "fail")
    assert lines(result, code=1) == TWO_NODES
    # salloc prints a line at the end.
    said = result.stderr[result.stderr.rindex("accel launch: rank") :].partition("salloc:")[0]
    assert said.startswith("accel launch: rank 1 of 2 failed first (local rank 0 on ")
    assert said.endswith("ValueError: no such file: labels.csv\n") and "accel-launch-failure" not in result.stderr


def test_a_dry_run_starts_nothing(run) -> None:
    result = run("salloc", "-N2", *CPU, "--num_processes", 4, "--dry_run", "s.py", "--lr", "0.1")
    assert result.returncode == 0 and not lines(result)
    assert "every node of the SLURM job (n1, n2), by one call of srun:" in result.stdout
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in result.stdout
    command = next(line for line in result.stdout.splitlines() if line.startswith("  command: "))
    assert (
        command.endswith(" s.py --lr 0.1")
        and " --cpu" in command
        and " --num_processes=4" in command
        and "dry_run" not in command
    )


@pytest.mark.slow  # a job on two nodes that must end; signals have fast tests on one host
@pytest.mark.timeout(960)
def test_a_signal_ends_the_ranks_of_all_nodes(cluster, run, tmp_path) -> None:
    env = environment(**cluster.env, GLOO_SOCKET_IFNAME="lo")
    allocation = subprocess.Popen(
        ["salloc", "-N2", "--no-shell"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = allocation.communicate(timeout=100)[1].split("allocation ")[1].split()[0]
    variables = {"SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    launcher = subprocess.Popen(
        [*CPU, "s.py", "sleep"], cwd=tmp_path, env={**env, **variables}, stderr=subprocess.DEVNULL
    )
    try:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        deadline = time.monotonic() + 150
        while not all(file.exists() and file.read_text() for file in files):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in files]
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(100) == 130
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.wait()
        subprocess.run(["scancel", job], env=env, check=True, timeout=100)


@pytest.mark.slow  # trains on two nodes; test_the_demo_learns_the_digits is fast, on one host
@pytest.mark.timeout(960)
def test_the_digits_example_learns_the_same(run) -> None:
    check_loss(run("srun", "-N2", "-n2", *CPU, SCRIPT, *ARGUMENTS).stdout)


@pytest.mark.slow  # a job with ranks that import torch; job environments have fast tests in accel-state
def test_a_task_for_each_rank_needs_no_launcher(run, tmp_path) -> None:
    (tmp_path / "gloo.py").write_text(GLOO)
    result = run("srun", "-N2", "-n2", "env", "MASTER_ADDR=127.0.0.1", sys.executable, "gloo.py")
    assert lines(result) == ["0 2 0 3.0", "1 2 0 3.0"]


@pytest.mark.slow  # a job on two nodes; test_this_machine_works is fast, on one host
def test_the_doctor_checks_every_node(run) -> None:
    result = run("salloc", "-N2", sys.executable, "-m", "accel_launch", "doctor", "--cpu", "--timeout", "180")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok    process group  2 process(es) on" in result.stdout and "ok    all-reduce     correct" in result.stdout


@pytest.mark.parametrize("hosts", ["n1", "n[1-2]", "gpu[07-09,12],big1", "n[098-101]", "a,b[3-4]"])
def test_host_lists_are_read_as_slurm_reads_them(cluster, hosts) -> None:
    words = ["scontrol", "show", "hostnames", hosts]
    shown = subprocess.run(
        words, env={**os.environ, **cluster.env}, capture_output=True, text=True, check=True, timeout=100
    ).stdout
    assert list(expand_hosts(hosts)) == shown.split()


@pytest.mark.slow  # a job of SLURM
def test_a_batch_script_that_the_command_writes(run, tmp_path) -> None:
    words = ["--nodes", 2, "--tasks-per-node", 2, "--time", "00:10:00", "--sbatch=--error=err"]
    wrote = run(sys.executable, "-m", "accel_launch", "slurm", *words, "--output", "job.sh", "--cpu", "s.py")
    assert wrote.returncode == 0, wrote.stderr
    accel = tmp_path / "bin" / "accel"
    accel.parent.mkdir()
    accel.write_text(f'#!/bin/bash\nexec {sys.executable} -m accel_launch "$@"\n')
    accel.chmod(0o755)
    submitted = run("env", f"PATH={accel.parent}:{os.environ['PATH']}", "sbatch", "--wait", "--output=out", "job.sh")
    errors = (tmp_path / "err").read_text() if (tmp_path / "err").exists() else submitted.stderr
    assert submitted.returncode == 0, errors
    assert sorted(line for line in (tmp_path / "out").read_text().splitlines() if line[:1].isdigit()) == FOUR_RANKS
