"""Where the processes of a launch on one machine listen: at loopback addresses only."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from components.digits import LAUNCH, environment

# Each process connects to the others, and waits to be looked at.
ACCEL = """
import sys, time
from pathlib import Path
import torch
from accel import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.ones(1))
folder = Path(sys.argv[1])
(folder / f"ready{accelerator.process_index}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
"""
PLAIN = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
folder = Path(sys.argv[1])
(folder / f"ready{dist.get_rank()}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""
REPLICA = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
accelerator, folder = Accelerator(cpu=True), Path(sys.argv[1])
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, data)
batches = iter(loader)
(batch,) = next(batches)
accelerator.backward(model(batch).sum())
(folder / f"ready{os.environ['ACCELERATE_FT_REPLICA']}.{os.environ['RANK']}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
os._exit(0)
"""
FUNCTION = """
import sys, time
from pathlib import Path
from accel_launch import notebook_launcher

def main(folder):
    import torch
    from accel import Accelerator
    accelerator = Accelerator(cpu=True)
    accelerator.reduce(torch.ones(1))
    (Path(folder) / f"ready{accelerator.process_index}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)

notebook_launcher(main, (sys.argv[1],), num_processes=2)
"""


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process and its descendants listen."""
    found = set()
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((str(connection.laddr.ip), int(connection.laddr.port)))
    return found


def check(folder: Path, script: str, commands: list[list[str]], ready: int, least: int, **variables: str) -> None:
    """Start commands, and look at them when so many processes are ready."""
    (folder / "s.py").write_text(script)
    runs = [
        subprocess.Popen(
            [*command, "s.py", str(folder)],
            cwd=folder,
            env={**environment(), "OMP_NUM_THREADS": "1", **variables, **own},
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, own in zip(commands, _ranks(len(commands)), strict=True)
    ]
    try:
        deadline = time.monotonic() + 150
        while len(list(folder.glob("ready*"))) < ready:
            failed = [run.communicate()[1] for run in runs if run.poll() is not None]
            assert time.monotonic() < deadline and not failed, failed
            time.sleep(0.05)
        found = set().union(*(listeners(run.pid) for run in runs))
    finally:
        (folder / "go").touch()
        try:
            for run in runs:
                run.communicate(timeout=60)
        finally:
            for run in runs:
                run.kill()
    assert len(found) >= least, found
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in found), found
    assert [run.returncode for run in runs] == [0] * len(runs)


def _ranks(count: int) -> list[dict[str, str]]:
    """Variables of Open MPI for several launchers, each of which becomes a rank; none for one."""
    if count == 1:
        return [{}]
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return [
        {**dict.fromkeys(names, str(rank)), **dict.fromkeys(sizes, str(count)), "OMPI_COMM_WORLD_NODE_RANK": "0"}
        for rank in range(count)
    ]


def test_processes_of_one_machine(tmp_path: Path) -> None:
    """The store and a pair of gloo for each."""
    check(tmp_path, ACCEL, [[*LAUNCH, "--cpu", "--num_processes=2"]], ready=2, least=3)


@pytest.mark.slow  # more of the same, each of which imports torch twice
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (PLAIN, ["--num_processes=2"]),
        (PLAIN, ["--num_processes=2", "--max_restarts=1", "--main_process_port=29547"]),
        (PLAIN, ["--num_processes=2", "--main_process_ip=localhost", "--main_process_port=29548"]),
        (PLAIN, ["--num_processes=2", "--rdzv_backend=c10d", "--tee=3"]),
    ],
)
def test_scripts_without_accel(tmp_path: Path, script: str, words: list[str]) -> None:
    check(tmp_path, script, [[*LAUNCH, "--cpu", *words]], ready=2, least=3)


@pytest.mark.slow  # several processes that import torch
def test_a_function(tmp_path: Path) -> None:
    check(tmp_path, FUNCTION, [[sys.executable]], ready=2, least=3)


@pytest.mark.slow  # two processes that import torch
def test_a_rank_for_each_launcher(tmp_path: Path) -> None:
    """As mpirun starts them: rank 0 serves the store."""
    commands = [[*LAUNCH, "--cpu"], [*LAUNCH, "--cpu"]]
    check(tmp_path, ACCEL, commands, 2, 3, MASTER_ADDR="127.0.0.1", MASTER_PORT="29549")


@pytest.mark.slow  # two and four processes that import torch and torchft
@pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft: pip install 'accel[ft]'")
@pytest.mark.parametrize(
    ("words", "ready", "least"),
    [
        ([], 2, 9),
        (["--processes_per_replica=2", "--use_fsdp", "--fsdp_version=2"], 4, 15),
    ],
    ids=["whole", "sharded"],
)
def test_replicas(tmp_path: Path, words: list[str], ready: int, least: int) -> None:
    """The lighthouse; and for each replica a store, a manager, a state and gloo."""
    check(tmp_path, REPLICA, [[*LAUNCH, "--cpu", "--ft", "--num_replicas=2", "--min_replicas=2", *words]], ready, least)
