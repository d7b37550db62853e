"""Accelerator(monitor=True): what is measured on several ranks, over saved states, and that training is unchanged."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

pytest.importorskip("accel")

from accel import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from accel.contract.strategy import Strategy
from accel.fault_tolerance.run_state import capture, restore
from accel.training import monitoring
from accel_monitor import Part, make_ledger, read_runs
from accel_monitor._torch_compat import PASSES_HIGHER_ORDER
from accel_monitor.ledger import Cause
from accel_state import ConfigurationError, MissingDependencyError, PartialState
from accel_state.ports import get_free_port
from accel_state.registry import Registry
from accel_state.testing import run_world


class Rows(Dataset):
    """64 samples; those of odd index, which rank 1 gets, take a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index // 4 % 2:
            time.sleep(self.seconds)
        return torch.linspace(index, index + 1, 4)


def train(folder: str, monitor: bool, seconds: float, fsdp: bool = False) -> tuple[torch.Tensor, list[float]]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(monitor=monitor, project_dir=folder, fsdp_plugin=plugin)
    torch.manual_seed(0)
    # With buffers, which DistributedDataParallel synchronises before each forward pass.
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8) if fsdp else nn.BatchNorm1d(8), nn.Linear(8, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Rows(seconds), batch_size=4)
    )
    for inputs in loader:
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    total = torch.cat([value.reshape(-1).float() for value in weights.values()]) if weights else torch.zeros(0)
    seconds_by_part = accelerator._monitor._monitor.snapshot().seconds if monitor else []
    accelerator.end_training()
    return total, seconds_by_part


def late_gathers(folder: str) -> list[float]:
    accelerator = Accelerator(monitor=True, project_dir=folder)
    model = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    )
    for (inputs,) in loader:
        loss = model(inputs).mean()
        accelerator.backward(loss)
        optimizer.step()
        time.sleep(0.02 * accelerator.process_index)
        accelerator.gather(loss.detach())
    seconds = accelerator._monitor._monitor.snapshot().seconds
    accelerator.end_training()
    return seconds


def metrics_and_positions(folder: str, monitor: bool, workers: int) -> list:
    accelerator = Accelerator(monitor=monitor, project_dir=folder)
    # 22 samples on two ranks in batches of 4: the last step has padding, which a metric must leave out.
    data = TensorDataset(torch.arange(22.0).reshape(22, 1))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers))
    model = accelerator.prepare(nn.Linear(1, 1))
    torch.manual_seed(1)
    found = []
    for training in (True, False, True):
        model.train(training)
        for (inputs,) in loader:
            found.append(accelerator.gather_for_metrics(inputs).flatten().tolist())
            found.append((loader.end_of_dataloader, loader.remainder, str(loader.state_dict())))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict(state)
    found += [inputs.flatten().tolist() for (inputs,) in loader]
    accelerator.end_training()
    return found


def on_each_rank(folder: str) -> dict[str, Any]:
    """The results of all of these runs in one world, each in a directory of its name."""
    runs = {
        "plain": (train, False, 0.0),
        "slow data": (train, True, 0.02),
        "fsdp": (train, True, 0.0, True),
        "plain fsdp": (train, False, 0.0, True),
        "late gathers": (late_gathers,),
        "metrics": (metrics_and_positions, False, 0),
        "measured metrics": (metrics_and_positions, True, 0),
    }
    found = {}
    for name, (function, *arguments) in runs.items():
        PartialState().reconnect()  # the end of a training ends the process group
        found[name] = function(f"{folder}/{name}", *arguments)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_world(on_each_rank, 2, str(folder), timeout=250)


def test_a_rank_that_waits_for_another_is_told_from_one_that_is_slow(two_ranks: tuple[Path, list[Any]]) -> None:
    folder, (first, second) = two_ranks
    (weights, fast), (_, slow) = first["slow data"], second["slow data"]
    torch.testing.assert_close(weights, first["plain"][0], rtol=0, atol=0)
    # Rank 1 has 8 batches of 4 samples, 0.64 s in all, for which rank 0 waits in the synchronisation of each step.
    assert slow[Part.DATA] >= 0.64 and fast[Part.WAITING] >= 0.8 * slow[Part.DATA]
    assert slow[Part.WAITING] < 0.5 * fast[Part.WAITING] and fast[Part.DATA] < 0.5 * slow[Part.DATA]
    (run,) = read_runs(folder / "slow data")
    assert [run.attempts[0, rank][0].last_step for rank in (0, 1)] == [8, 8]
    assert run.attempts[0, 0][0].samples[-1].samples == 32 and run.attempts[0, 1][0].finished
    assert len(run.notes) == (not PASSES_HIGHER_ORDER)  # of operations that an old torch cannot count


def test_fsdp_is_measured_as_a_whole_and_says_so(two_ranks: tuple[Path, list[Any]]) -> None:
    folder, (first, _) = two_ranks
    weights, seconds = first["fsdp"]
    torch.testing.assert_close(weights, first["plain fsdp"][0], rtol=0, atol=0)
    assert seconds[Part.WAITING] == 0 and seconds[Part.FORWARD] > 0 and seconds[Part.BACKWARD] > 0
    (run,) = read_runs(folder / "fsdp")
    assert any("part of the forward and backward" in note for note in run.notes)


def make(folder: Path, **settings) -> tuple:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, **settings)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(40, 4)), 4))


def steps(parts: tuple, count: int) -> None:
    accelerator, model, optimizer, loader = parts
    for _, (inputs,) in zip(range(count), loader, strict=False):
        accelerator.backward(model(inputs).mean())
        optimizer.step()


def test_saved_and_loaded_states_are_in_the_ledger(tmp_path: Path) -> None:
    parts = make(tmp_path, monitor=True)
    steps(parts, 4)
    parts[0].save_state()
    steps(parts, 3)
    parts[0].load_state()
    steps(parts, 5)
    parts[0].end_training()
    (run,) = read_runs(tmp_path)
    (attempt,) = run.attempts[0, 0]
    assert [(load.step, load.before) for load in attempt.loads] == [(4, 7)] and len(attempt.saves) == 1
    ledger = make_ledger(run)
    assert ledger.repeated_steps == 3 and ledger.seconds[Cause.AGAIN] > 0
    assert ledger.seconds[Cause.SAVING] == pytest.approx(attempt.saves[0], rel=0.01)
    assert ledger.total == pytest.approx(ledger.wall) and attempt.last_step == 9


def test_a_replica_that_joins_again_counts_from_the_state_that_it_gets(tmp_path: Path) -> None:
    leader = make(tmp_path / "leader")
    steps(leader, 6)
    joined = make(tmp_path / "run", monitor=True)
    restore(joined[0], capture(leader[0]))
    steps(joined, 3)
    joined[0].end_training()
    (run,) = read_runs(tmp_path / "run")
    (attempt,) = run.attempts[0, 0]
    assert [(load.step, load.before) for load in attempt.loads] == [(6, 0)] and attempt.last_step == 9
    assert make_ledger(run).repeated_steps == 0


def test_an_accelerator_without_a_monitor_has_nothing_of_it(tmp_path: Path) -> None:
    parts = make(tmp_path)
    assert parts[0]._monitor is None and "backward" not in vars(parts[0])
    assert type(parts[3]).__iter__ is not None and "accel_monitor" not in type(parts[3]).__dict__
    assert not (tmp_path / "monitor").exists()


def test_a_measured_accelerator_can_be_pickled(tmp_path: Path) -> None:
    parts = make(tmp_path, monitor=True)
    steps(parts, 2)
    duplicate = pickle.loads(pickle.dumps(parts[0]))
    assert duplicate._monitor is not parts[0]._monitor and "backward" not in vars(duplicate)
    parts[0].end_training()
    assert "backward" not in vars(parts[0])


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(Strategy):
        uses_engine = True

    with pytest.raises(ConfigurationError, match="Engine"):
        Accelerator(cpu=True, monitor=True, strategy=Engine())
    monkeypatch.setattr(monitoring, "MONITORS", Registry("monitor", {}))
    with pytest.raises(MissingDependencyError, match=r"accel\[monitor\]"):
        Accelerator(cpu=True, monitor=True)


SCRIPT = """
import os, random, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, ProjectConfiguration
folder, steps, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(8, 1)
data = DataLoader(TensorDataset(torch.ones(4096, 8)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
accelerator.resume()
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
random.seed(restart)
victim, moment = random.randrange(2), random.randrange(15, 45)
log = os.open(f"{folder}/steps-{accelerator.process_index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
here = 0
while optimizer.steps_taken < steps:
    for (inputs,) in loader:
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        os.write(log, b"%d\\n" % optimizer.steps_taken)
        here += 1
        time.sleep(0.005)
        if here == moment and restart < kills and accelerator.process_index == victim:
            os.kill(os.getpid(), 9)
        if optimizer.steps_taken % 20 == 0:
            accelerator.save_state()
        if optimizer.steps_taken >= steps:
            break
accelerator.end_training()
"""


@pytest.mark.timing  # the time of the launcher itself; starts two ranks four times
@pytest.mark.timeout(400)
def test_killed_ranks_lose_no_second_and_no_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--cpu", "--num_processes", "2", "--max_restarts", "3", "--monitor", script, tmp_path, 100, 3]
    began = time.time()
    command = [sys.executable, "-m", "accel_launch", "launch", *map(str, words)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=380, capture_output=True)
    wall = time.time() - began
    ledger = make_ledger(read_runs(tmp_path)[0])
    for rank in (0, 1):
        executed = (tmp_path / f"steps-{rank}").read_text().split()
        own = make_ledger(read_runs(tmp_path)[0])
        own.run.attempts = {(0, rank): own.run.attempts[0, rank]}
        repeated = make_ledger(own.run).repeated_steps
        # The step in which a process dies may be complete although its record is not written, or not yet logged.
        assert abs(repeated - (len(executed) - len(set(executed)))) <= 3
    assert ledger.failures == 3 and ledger.seconds[Cause.DEAD] > 0 and ledger.seconds[Cause.AGAIN] > 0
    assert ledger.total == pytest.approx(2 * ledger.wall, rel=0.01)
    # From the start of the launcher to its exit.
    assert ledger.wall == pytest.approx(wall, rel=0.01)
    assert all(ledger.seconds[cause] > 0 for cause in (Cause.LAUNCH, Cause.IMPORTS, Cause.EXIT, Cause.LAUNCHER))


UNFINISHED = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(8, 1)
data = DataLoader(TensorDataset(torch.ones(160, 8)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
for (inputs,) in loader:
    accelerator.backward(model(inputs).mean())
    optimizer.step()
"""


@pytest.mark.slow  # starts a launcher and its ranks twice
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_launch_in_a_directory_is_a_run_of_its_own(tmp_path: Path, processes: int) -> None:
    """Neither launch calls end_training(); that of one process becomes the script, whose parent is this one."""
    script = tmp_path / "train.py"
    script.write_text(UNFINISHED)
    words = ["--cpu", "--num_processes", str(processes), "--monitor", str(script), str(tmp_path)]
    began = time.time()
    for _ in range(2):
        command = [sys.executable, "-m", "accel_launch", "launch", *words]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=140)
    runs = read_runs(tmp_path)
    assert [[attempt.last_step for (attempt,) in run.attempts.values()] for run in runs] == [
        [20 // processes] * processes
    ] * 2
    for run in runs:
        ledger = make_ledger(run)
        assert ledger.seconds[Cause.BETWEEN] == 0 and run.begin >= began - 1


SERVED = (
    UNFINISHED
    + """
import http.client, time
from pathlib import Path
folder, port = Path(sys.argv[1]), int(sys.argv[2])
text, steps, deadline = "", [], time.monotonic() + 60
while accelerator.is_main_process and (len(steps) < 2 or min(steps) < 10) and time.monotonic() < deadline:
    time.sleep(0.5)
    try:
        token = (folder / "monitor" / "token").read_text().strip()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        text = connection.getresponse().read().decode()
    except OSError:
        continue
    steps = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("accel_monitor_step{")]
if accelerator.is_main_process:
    (folder / "metrics").write_text(text)
accelerator.wait_for_everyone()
accelerator.end_training()
"""
)


@pytest.mark.slow  # a launcher, two ranks and a server
@pytest.mark.timeout(300)
def test_the_launchers_port_serves_all_ranks_while_they_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVED)
    port = get_free_port()
    words = ["--cpu", "--num_processes", 2, "--monitor_port", port, tmp_path / "train.py", tmp_path, port]
    command = [sys.executable, "-m", "accel_launch", "launch", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=environment, timeout=240, capture_output=True, text=True)
    assert f"serves this run at http://127.0.0.1:{port}/metrics" in done.stderr
    lines = (tmp_path / "metrics").read_text().splitlines()
    for rank in (0, 1):
        name = f'accel_monitor_step{{replica="0",rank="{rank}",'
        assert [float(line.split()[-1]) for line in lines if line.startswith(name)] == [10]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_rank_waits_for_the_others_in_the_collectives_of_the_script_too(two_ranks: tuple[Path, list[Any]]) -> None:
    early, late = (rank["late gathers"] for rank in two_ranks[1])
    # 8 batches a rank, after each of which rank 0 waits for 20 ms.
    assert early[Part.WAITING] >= 0.13 > early[Part.OTHER] and late[Part.OTHER] >= 0.16


def test_metrics_and_positions_are_those_of_an_unmeasured_loader(two_ranks: tuple[Path, list[Any]]) -> None:
    check_metrics(*([rank[name] for rank in two_ranks[1]] for name in ("metrics", "measured metrics")))


@pytest.mark.slow  # workers start for a minute
@pytest.mark.timeout(300)
def test_metrics_and_positions_with_workers(tmp_path: Path) -> None:
    check_metrics(*(run_world(metrics_and_positions, 2, str(tmp_path), monitor, 2) for monitor in (False, True)))


def check_metrics(plain: list[Any], measured: list[Any]) -> None:
    first_epoch = chain.from_iterable(item for item in plain[0][:6] if isinstance(item, list))
    assert sorted(first_epoch) == [float(index) for index in range(22)]
    assert measured == plain
