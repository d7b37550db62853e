"""Two hosts, as network namespaces with a cable between them: static and c10d rendezvous, and a worker killed in the
middle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from components import namespaces
from components.digits import LAUNCH, environment
from torch import nn

from accel_state import run_token

_MISSING = namespaces.missing()
# Two launchers, and two ranks that import torch, up to three times.
pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "hosts can be made"),
    pytest.mark.timeout(960),
]

RESUMING = """
# Trains a number of steps over all ranks, from where the last start of it has come. In the steps named, each as
# STEP:RANK:OTHERS, that rank waits to be killed.
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, file = dist.get_rank(), sys.argv[1]
deaths = {int(step): (int(victim), others) for step, victim, others in (word.split(":") for word in sys.argv[2:])}
weight, first = torch.ones(4, dtype=torch.float64), 0
if os.path.exists(file):
    weight, first = torch.load(file)
for step in range(first, 30):
    gradient = (weight - (rank + 1)) * torch.arange(1, 5)
    dist.all_reduce(gradient)
    weight = weight - 0.01 * gradient
    dist.barrier()
    if rank == 0:
        torch.save((weight, step + 1), file + ".tmp")
        os.replace(file + ".tmp", file)
    if step in deaths:
        victim, others = deaths[step]
        with open(f"{file}.{step}.pid{rank}", "w") as pid:
            pid.write(str(os.getpid()))
        # The surviving ranks wait for this rank in the next collective.
        time.sleep(300 if others == "asleep" or rank == victim else 0)
if rank == 0:
    print("weight", weight.tolist(), "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""

REPLICA = """
# Trains until the step in the file "last", and notes how many replicas computed each step.
import os, time
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
torch.manual_seed(3)
accelerator, last = Accelerator(cpu=True), Path("last")
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
accelerator.resume()
sizes = open(f"sizes{os.environ['ACCELERATE_FT_REPLICA']}", "a", buffering=1)
while not (last.exists() and optimizer.steps_taken >= int(last.read_text())):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            sizes.write(f"{optimizer.steps_taken} {accelerator.strategy._group.size}\\n")
            time.sleep(0.1)
            if last.exists() and optimizer.steps_taken >= int(last.read_text()):
                break
torch.save(model.state_dict(), f"end{os.environ['ACCELERATE_FT_REPLICA']}")
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    with namespaces.Hosts() as made:
        yield made


class Run:
    """The same launch on both hosts."""

    def __init__(self, hosts: namespaces.Hosts, folder: Path, *words: object, ranks: bool = True) -> None:
        self.processes = []
        common = ["--cpu", "--num_machines=2", "--main_process_ip=10.77.0.1", "--main_process_port=29511"]
        for host in (1, 0):  # the machine of rank 0 may be the last
            rank = [f"--machine_rank={host}"] if ranks else []
            command = hosts.command(host, [*LAUNCH, *common, *rank, *map(str, words)])
            pipe = subprocess.PIPE
            self.processes.insert(
                0, subprocess.Popen(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True)
            )

    def await_files(self, files: list[Path], seconds: float = 150) -> None:
        """Wait until files have been written."""
        deadline = time.monotonic() + seconds
        while not all(file.exists() and file.read_text() for file in files):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                for process in self.processes:
                    process.terminate()
                pytest.fail(
                    f"{[file.name for file in files if not file.exists()]}: "
                    f"{[one.communicate(timeout=60) for one in self.processes]}"
                )
            time.sleep(0.1)

    def wait(self, seconds: float = 150) -> list[str]:
        """The output of both hosts, which must succeed."""
        try:
            outputs = [process.communicate(timeout=seconds) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in self.processes] == [0, 0], outputs
        self.errors = "".join(errors for _, errors in outputs)
        return [output for output, _ in outputs]


def trained_alone(ranks: int) -> list[float]:
    """The final weight of RESUMING, computed in one process."""
    weight = torch.ones(4, dtype=torch.float64)
    for _ in range(30):
        weight = weight - 0.01 * sum((weight - (rank + 1)) * torch.arange(1, 5) for rank in range(ranks))
    return weight.tolist()


@pytest.mark.slow  # two hosts start their ranks two or three times; test_restarts is fast, on one host
@pytest.mark.parametrize(
    ("backend", "deaths"),
    [("static", [(10, 0, "in a collective"), (20, 1, "asleep")]), ("c10d", [(10, 1, "asleep")])],
    ids=["static", "c10d"],
)
def test_a_killed_worker_is_started_again(hosts, tmp_path, backend, deaths: list[tuple[int, int, str]]) -> None:
    """On either machine, and whatever the other ranks do: they do not notice the failure themselves. Several ranks of
    a machine: test_static_rendezvous.
    """
    (tmp_path / "s.py").write_text(RESUMING)
    words = [
        "--num_processes=2",
        f"--rdzv_backend={backend}",
        f"--max_restarts={len(deaths)}",
        "--monitor_interval=0.1",
        *("s.py", "state", *(":".join(map(str, death)) for death in deaths)),
    ]
    run = Run(hosts, tmp_path, *words, ranks=backend == "static")
    for step, victim, _ in deaths:
        pids = [tmp_path / f"state.{step}.pid{rank}" for rank in (0, 1)]
        run.await_files(pids)
        os.kill(int(pids[victim].read_text()), signal.SIGKILL)
    output = "".join(run.wait())
    weight, _, restarts = output.removeprefix("weight ").partition(" restarts ")
    assert json.loads(weight) == pytest.approx(trained_alone(2), rel=1e-12)
    assert restarts == f"{len(deaths)}\n"
    for number in range(1, len(deaths) + 1):
        assert f"starting all processes again (restart {number} of {len(deaths)})" in run.errors


# Asks a port of another host to kill a replica, to show its status, and to let it join; prints what it got.
NEIGHBOUR = """
import socket, sys
from datetime import timedelta
address = sys.argv[1], int(sys.argv[2])
for request in (b"POST /replica/accel_0/kill", b"GET /"):
    request += b" HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(request.ljust(64))
        print(len(b"".join(iter(lambda: connection.recv(1000), b""))))
from torchft.coordination import LighthouseClient
wait = timedelta(seconds=5)
try:
    LighthouseClient(f"http://{address[0]}:{address[1]}", wait).heartbeat("foreign", wait)
    print("joined")
except Exception as error:
    print("refused")
"""


def check_neighbours(hosts: namespaces.Hosts) -> None:
    """A process without the token, on the other host, gets a challenge and nothing else. And where the hosts listen."""
    command = hosts.command(1, [sys.executable, "-c", NEIGHBOUR, "10.77.0.1", "29514"])
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["32", "32", "refused"]
    for host, address in enumerate(("10.77.0.1", "10.77.0.2")):
        shown = subprocess.run(
            hosts.command(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]), capture_output=True, text=True, check=True
        )
        fields = [line.split() for line in shown.stdout.splitlines()]
        found = {words[1].partition(":")[0] for words in fields if words[3] == "0A"}
        number = bytes(map(int, address.split(".")))[::-1].hex().upper()  # as Linux writes it
        assert found == {"0100007F", number}


@pytest.mark.slow  # two hosts, and time limits that must pass
@pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft: pip install 'accel[ft]'")
def test_a_cable_is_cut_and_mended(hosts, tmp_path) -> None:
    """The replica on the machine of the lighthouse goes on alone; the other one takes its share again."""
    (tmp_path / "s.py").write_text(REPLICA)
    words = ["--cpu", "--ft", "--num_replicas=2", "--replica_timeout=8", "--num_machines=2"]
    words += ["--main_process_ip=10.77.0.1", "--main_process_port=29514"]
    token = {run_token.VARIABLE: run_token.make_token()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen(
            hosts.command(host, [*LAUNCH, *words, f"--machine_rank={host}", "s.py"]),
            cwd=tmp_path,
            env=environment(**token),
            **pipes,
        )
        for host in (0, 1)
    ]

    def sizes(host: int) -> list[str]:
        file = tmp_path / f"sizes{host}"
        return [line.split()[1] for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not what():
            assert time.monotonic() < deadline and all(one.poll() is None for one in started), (sizes(0), sizes(1))
            time.sleep(0.1)

    try:
        wait_for(lambda: sizes(1).count("2") > 5)
        check_neighbours(hosts)
        hosts.set_cable(plugged=False)
        wait_for(lambda: sizes(0).count("1") > 15)
        alone = len(sizes(0))
        hosts.set_cable(plugged=True)
        wait_for(lambda: sizes(0)[alone:].count("2") > 5)
        last = int((tmp_path / "sizes0").read_text().splitlines()[-1].split()[0]) + 10
        (tmp_path / "last.part").write_text(str(last))
        (tmp_path / "last.part").rename(tmp_path / "last")
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        hosts.set_cable(plugged=True)
        for process in started:
            process.terminate()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], outputs
    ends = [torch.load(tmp_path / f"end{host}") for host in (0, 1)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    torch.manual_seed(3)
    x, y, model = torch.randn(64, 4), torch.randn(64, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(last):
        part = slice(step % 8 * 8, step % 8 * 8 + 8)
        optimizer.zero_grad()
        (model(x[part]) - y[part]).pow(2).mean().backward()
        optimizer.step()
    torch.testing.assert_close(ends[0], model.state_dict())


@pytest.mark.slow  # starts ranks on two hosts; test_this_machine_works is fast, on one host
def test_the_doctor_passes_on_both_hosts(hosts, tmp_path) -> None:
    common = [
        "--cpu",
        "--num_processes=2",
        "--num_machines=2",
        "--main_process_ip=10.77.0.1",
        "--main_process_port=29512",
        "--timeout=250",
    ]
    command = [*LAUNCH[:-1], "doctor", *common]
    processes = [
        subprocess.Popen(
            hosts.command(host, [*command, f"--machine_rank={host}"]),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in (0, 1)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for output in outputs:
        assert "process group  2 process(es) on host0, host1, gloo" in output
        assert "point to point correct" in output and "clocks" in output


@pytest.mark.slow  # waits for a host; test_processes_that_fail_are_quoted is fast
def test_the_doctor_reports_a_host_that_does_not_answer(hosts, tmp_path) -> None:
    words = [
        "--cpu",
        "--num_processes=2",
        "--num_machines=2",
        "--main_process_ip=10.77.0.1",
        "--machine_rank=1",
        "--timeout=8",
    ]
    done = subprocess.run(
        hosts.command(1, [*LAUNCH[:-1], "doctor", *words]),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "fail  processes" in done.stdout and "Run the doctor on every machine" in done.stdout
