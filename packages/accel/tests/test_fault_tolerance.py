"""Replicas that are killed: real processes, torchft's lighthouse, and the weights of a run that nobody killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ft_runs import prepared
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel import Accelerator, DataLoaderConfiguration
from accel.fault_tolerance.lighthouse_watch import LighthouseWatch
from accel.fault_tolerance.replica_collectives import ReplicaCollectives
from accel.fault_tolerance.replica_tracking import Recent, Row
from accel.fault_tolerance.run_state import capture, restore
from accel.reduction.shard_reduction import ShardReduction
from accel_data.elastic import ElasticPlan
from accel_state.errors import ConfigurationError
from accel_state.options import check, load_groups, resolve
from accel_track.jsonl_reader import read_run

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft: pip install 'accel[ft]'")

# Events are REPLICA:STEP:WHAT. Each happens once, in the middle of a step that all replicas compute. PAUSES are
# REPLICA:STEP: it stops itself after that step.
SCRIPT = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, ProjectConfiguration

folder, total, replicas = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["ACCELERATE_FT_NUM_REPLICAS"])
number = os.environ["ACCELERATE_FT_REPLICA"]
torch.manual_seed(3)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, log_with="jsonl",
    project_config=ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True),
)
accelerator.init_trackers("run", {"lr": 0.05})
data = TensorDataset(torch.randn(200, 8), torch.randn(200, 1), torch.arange(200))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * total)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
average = accelerator.moving_average(model, 0.9)
accelerator.resume()
records = open(folder / f"{number}.{os.getpid()}.jsonl", "a", buffering=1)

def act():
    last = 0
    for event in filter(None, os.environ.get("EVENTS", "").split(",")):
        replica, step, what = event.split(":")
        marker = folder / event
        if marker.exists():
            last = int(marker.read_text() or 1000)
            continue
        if replica != number or optimizer.steps_taken < max(int(step), last + 3):
            return
        if accelerator.strategy._group.size < replicas:
            return
        marker.write_text(str(optimizer.steps_taken))
        if what == "HANG":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(1000)

seen, pauses = [], os.environ.get("PAUSES", "").split(",")
while optimizer.steps_taken < total:
    for x, y, ids in loader:
        with accelerator.accumulate(model):
            seen += ids.tolist()
            weights = (ids % 3 + 1).float()
            loss = ((model(x) - y).pow(2).squeeze(1) * weights).sum()
            accelerator.backward(loss, num_items=weights.sum(), reduction="sum")
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                act()
            optimizer.step(); average.update(); scheduler.step(); optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            records.write(json.dumps([optimizer.steps_taken, seen]) + "\\n")
            (folder / f"step.{number}").write_text(str(optimizer.steps_taken))
            if optimizer.steps_taken % 40 == 0:
                accelerator.save_state()
        if accelerator.sync_gradients:
            seen = []
            accelerator.log({"lr": scheduler.get_last_lr()[0]}, step=optimizer.steps_taken)
            if f"{number}:{optimizer.steps_taken}" in pauses:
                (folder / f"paused.{number}.{optimizer.steps_taken}").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if accelerator.strategy._group.size < replicas and optimizer.steps_taken > 4:
                time.sleep(1.0)  # time for the dead to return
            if optimizer.steps_taken >= total:
                break
with average.applied():
    averaged = [item.numpy().tobytes() for item in model.state_dict().values()]
weights = [item.numpy().tobytes() for item in model.state_dict().values()]
digest = hashlib.sha256(b"".join(weights + averaged)).hexdigest()
(folder / f"end.{number}").write_text(json.dumps([digest, optimizer.steps_taken, scheduler.get_last_lr()]))
accelerator.end_training()
"""


def start(folder: Path, steps: int, *words: str, script: str = SCRIPT, **variables: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    launch = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--ft", "--num_replicas", "2", *words]
    return subprocess.Popen(
        [*launch, str(folder / "train.py"), str(folder), str(steps)],
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run: subprocess.Popen[str], seconds: float) -> str:
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        run.terminate()
        output, _ = run.communicate()
        pytest.fail(f"the run did not end in {seconds} s:\n{output[-6000:]}")
    assert run.returncode == 0, output[-6000:]
    return output


def tracked(folder: Path) -> dict[int, float]:
    """The logged values by step; fails if there are several runs, or a step is there twice."""
    (run,) = (folder / "project" / "run").iterdir()
    rows = [row for row in read_run(run).rows if "lr" in row]
    assert len({row["_step"] for row in rows}) == len(rows)
    return {row["_step"]: row["lr"] for row in rows}


STEPS = 120


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of SCRIPT in which nothing happens."""
    folder = tmp_path_factory.mktemp("ft") / "quiet"
    finish(start(folder, STEPS), 120)
    return folder


def check_ends(folder: Path, quiet: Path) -> None:
    """The weights and the rows of the tracker are those of the quiet run."""
    ends = [json.loads(file.read_text()) for file in quiet.glob("end.*")]
    assert len(ends) == 2 and ends[0] == ends[1] and ends[0][1] == STEPS
    # On a machine with much other work the last one that was killed may not have returned in time.
    found = [json.loads(file.read_text()) for file in folder.glob("end.*")]
    assert found and all(end == ends[0] for end in found)
    # One run in the tracker, with each step once.
    expected = tracked(quiet)
    assert list(expected) == list(range(1, STEPS + 1))
    assert tracked(folder) == expected


def lighthouse_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    """The lighthouse of a run, if it accepts connections."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(run.pid).children():
            if "accel_launch.lighthouse" in " ".join(child.cmdline()):
                listens = any(each.status == psutil.CONN_LISTEN for each in child.net_connections("tcp"))
                return child if listens else None
    return None


def wait_for(run: subprocess.Popen[str], condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What the condition returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert run.poll() is None and time.monotonic() < deadline, f"{condition} is not fulfilled"
        time.sleep(0.02)
    return found


@needs_torchft
@pytest.mark.slow  # two runs of several processes, which are killed and import torch again: half a minute
@pytest.mark.timeout(300)
def test_killed_replicas_change_nothing(tmp_path: Path, quiet: Path) -> None:
    """A replica is killed, then the one that leads, one hangs, one is stopped."""
    events = ("1:12:SIGKILL", "0:24:SIGKILL", "1:36:SIGSTOP", "0:48:HANG")
    folder = tmp_path / "killed"
    # Twice a replica hangs for this long; saving the state on a slow disk must not.
    output = finish(start(folder, STEPS, "--replica_timeout", "8", EVENTS=",".join(events)), 200)
    assert all((folder / event).exists() for event in events), output
    assert "replica 1 ended (SIGKILL); restarting it, the others continue" in output
    assert output.count("makes no progress; killing it") == 2
    check_ends(folder, quiet)
    # Every state is there, and holds the weights of that step.
    for number in range(3):
        states = [each / "project" / "checkpoints" / f"checkpoint_{number}" for each in (quiet, folder)]
        weights = [(state / "model.safetensors").read_bytes() for state in states]
        assert weights[0] == weights[1]
        averages = [(state / "moving_average.safetensors").read_bytes() for state in states]
        assert averages[0] == averages[1] != weights[0]


@needs_torchft
@pytest.mark.slow  # a run of several processes, of which one is killed and imports torch again: a quarter of a minute
@pytest.mark.timeout(300)
def test_nobody_goes_on_alone_after_the_lighthouse_was_restarted(tmp_path: Path, quiet: Path) -> None:
    """Three times a replica is stopped while the lighthouse is restarted, then the one that leads is killed."""
    folder, pauses = tmp_path / "restarted", ("1:20", "0:40", "1:60")
    options = ("--replica_timeout", "20", "--heartbeat_timeout", "5")
    run = start(folder, STEPS, *options, PAUSES=",".join(pauses), EVENTS="0:80:SIGKILL")
    try:
        for pause in pauses:
            file = folder / f"paused.{pause.replace(':', '.')}"
            pid = int(wait_for(run, lambda file=file: file.exists() and file.read_text()))
            wait_for(run, lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            former = wait_for(run, lambda: lighthouse_of(run))
            former.kill()
            wait_for(run, lambda former=former: lighthouse_of(run) not in (None, former))
            time.sleep(1.5)  # the other replica gets a quorum, in which it is alone
            os.kill(pid, signal.SIGCONT)
        output = finish(run, 100)
    finally:
        if run.poll() is None:
            run.terminate()
            print(run.communicate()[0])
    assert output.count("the lighthouse ended (SIGKILL); starting it again") == len(pauses)
    assert output.count("restarting it, the others continue") == 1, output
    check_ends(folder, quiet)
    # Every sample of a step was counted once, by one of the replicas.
    for step, ids in samples(quiet).items():
        if 5 < step < 75:
            assert samples(folder)[step] == ids


def samples(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample was used in each step that was committed."""
    used: dict[int, Counter[int]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            step, ids = json.loads(line)
            used.setdefault(step, Counter()).update(ids)
    return used


SHARDED = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, ProjectConfiguration

folder, total = Path(sys.argv[1]), int(sys.argv[2])
number, rank, restarts = (os.environ[name] for name in ("ACCELERATE_FT_REPLICA", "RANK", "ACCELERATE_FT_RESTARTS"))
torch.manual_seed(3)
project = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 1))
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1), torch.arange(96))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
torch.save((model.state_dict(), data.tensors), folder / f"begin.{number}.{rank}.{restarts}")
model, optimizer, scheduler, loader = accelerator.prepare(
    model, optimizer, scheduler, DataLoader(data, batch_size=int(os.environ["BATCH"]))
)
average = accelerator.moving_average(model, 0.9)
accelerator.resume()
kills = {("1", "1"): 5, ("0", "0"): 14}  # the process that leads is the second
while optimizer.steps_taken < total:
    for x, y, ids in loader:
        with accelerator.accumulate(model):
            weights = (ids % 3 + 1).float()
            loss = ((model(x) - y).pow(2).squeeze(1) * weights).sum()
            due = optimizer.steps_taken >= kills.get((number, rank), total)
            if restarts == "0" and due and accelerator.strategy._group.size == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss, num_items=weights.sum(), reduction="sum")
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step(); average.update(); scheduler.step(); optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            if accelerator.strategy._group.size < 2 and optimizer.steps_taken > 4:
                time.sleep(2.0)  # time for the dead to return
            if optimizer.steps_taken == total - 4:
                accelerator.save_state()
        if optimizer.steps_taken >= total:
            break
with average.applied():
    averaged = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
weights = accelerator.get_state_dict(model)
if rank == "0":
    torch.save((weights, averaged, optimizer.steps_taken, scheduler.get_last_lr()), folder / f"end.{number}")
accelerator.end_training()
"""


def trained_whole(folder: Path, steps: int, shards: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that SHARDED trains and their averages, in one process."""
    weights, (x, y, ids) = torch.load(folder / "begin.0.0.0")
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 1))
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(steps):
        part = slice(step % 4 * 24, step % 4 * 24 + 24)
        items = (ids[part] % 3 + 1).float()
        loss = ((model(x[part]) - y[part]).pow(2).squeeze(1) * items).sum() / items.sum()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.99 ** (shards * step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


@needs_torchft
@pytest.mark.slow  # two replicas of one or two processes, which are started again
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_restarted_replicas_train_as_one_process_does(tmp_path: Path, processes: int) -> None:
    """The replica that leads is killed, and with two processes one of the other replica, which is restarted whole."""
    steps = 24
    # Nothing hangs here; saving the state may take seconds on a slow disk, in which the other replica waits.
    words = ["--replica_timeout", "60"]
    if processes > 1:
        words += ["--use_fsdp", "--fsdp_version", "2", "--processes_per_replica", str(processes)]
    output = finish(start(tmp_path, steps, *words, script=SHARDED, BATCH=str(6 // processes)), 200)
    restarts = re.findall(r"replica \d ended \(SIGKILL\); restarting it, the others continue", output)
    assert len(restarts) == processes, output
    expected, expected_averages = trained_whole(tmp_path, steps, 2 * processes)
    ends = [torch.load(file) for file in tmp_path.glob("end.*")]
    assert ends, output
    for weights, averages, taken, (rate,) in ends:
        assert taken == steps and rate == pytest.approx(0.1 * 0.99 ** (2 * processes * steps))
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(averages, expected_averages, rtol=0, atol=1e-6)
    assert len(list((tmp_path / "project" / "checkpoints").iterdir())) == 1


# Of three replicas, those of the second machine die in the same step. The other one computes the next step alone, until
# both have returned and have waited for longer than --replica_timeout.
FAR = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator

folder = Path(sys.argv[1])
number, restarts = os.environ["ACCELERATE_FT_REPLICA"], os.environ["ACCELERATE_FT_RESTARTS"]
torch.manual_seed(3)
accelerator = Accelerator(cpu=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(torch.randn(1800, 8)), batch_size=3)
)
(folder / f"ready.{number}.{restarts}").touch()
accelerator.resume()  # joins the others
last = 1000
for (x,) in loader:
    size, step = accelerator.strategy._group.size, optimizer.steps_taken
    if last == 1000 and restarts == "0" and size == 3 and step >= 3:
        last = step + 8
        (folder / f"died.{number}").write_text(str(step))
        if number != "0":
            os.kill(os.getpid(), signal.SIGKILL)
    if last == 1000 and restarts == "0":
        time.sleep(0.5)  # until all three are there
    if number == "0" and size == 1 and last != 1000 and not (folder / "slept").exists():
        while not all((folder / f"ready.{other}.1").exists() for other in (1, 2)):
            time.sleep(0.1)
        time.sleep(8.0)
        (folder / "slept").touch()
    if number == "0" and size < 3 and (folder / "slept").exists():
        time.sleep(0.5)  # until both have joined
    accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    if not accelerator.optimizer_step_was_skipped:
        with (folder / "steps").open("a") as file:
            file.write(f"{number} {restarts} {optimizer.steps_taken}\\n")
    last = int((folder / "died.0").read_text()) + 30 if (folder / "died.0").exists() else last
    if optimizer.steps_taken >= last:
        break
accelerator.end_training()
"""


@needs_torchft
@pytest.mark.slow  # starts five processes, which wait for each other
@pytest.mark.timeout(300)
def test_replicas_of_a_machine_do_not_begin_a_run_of_their_own(tmp_path: Path) -> None:
    """Both of a machine start again while the only other one, on another machine, computes a long step."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--num_replicas=3", "--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}"]
    token = {"ACCELERATE_RUN_TOKEN": "a token of this run and no other"}
    limits = ("--replica_timeout", "2", "--heartbeat_timeout", "2")
    runs = [start(tmp_path, 0, *words, *limits, f"--machine_rank={rank}", script=FAR, **token) for rank in (0, 1)]
    outputs = [finish(run, 250) for run in runs]
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    again = [step for _, restarts, step in steps if restarts == 1]
    died = int((tmp_path / "died.0").read_text())
    assert again and min(again) > died, f"{died} {steps}\n{outputs}"


# The launcher does not look from the start until replica 0 has ended; replica 1 has something left to do then.
UNSEEN = """
import os, signal, sys, time
from pathlib import Path
import psutil
folder, number, launcher = Path(sys.argv[1]), os.environ["ACCELERATE_FT_REPLICA"], os.getppid()
(folder / f"up.{number}").touch()
while not (folder / "up.1").exists():
    time.sleep(0.01)
if number == "0":
    os.kill(launcher, signal.SIGSTOP)
    (folder / "pid.0").write_text(str(os.getpid()))
import torch
from accel import Accelerator
try:
    accelerator = Accelerator(cpu=True)
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    while optimizer.steps_taken < 3:
        for x in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
    if number == "1":
        first = psutil.Process(int((folder / "pid.0").read_text()))
        while first.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
finally:
    if number == "1":
        os.kill(launcher, signal.SIGCONT)
time.sleep(2 * int(number))
(folder / f"end.{number}").touch()
accelerator.end_training()
"""


@needs_torchft
@pytest.mark.slow  # a run of two processes
def test_a_replica_that_nobody_has_seen_computing_may_finish(tmp_path: Path) -> None:
    """All steps are between two looks of the launcher, as in a short run on a busy machine."""
    output = finish(start(tmp_path, 0, "--min_replicas", "2", script=UNSEEN), 100)
    assert (tmp_path / "end.0").exists() and (tmp_path / "end.1").exists(), output


@needs_torchft
@pytest.mark.slow  # starts three times two processes
def test_a_script_that_fails_ends_the_run(tmp_path: Path) -> None:
    run = start(tmp_path / "run", 1, script="import sys; sys.exit(3)")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 3
    assert "ended (exit code 3) after 2 restarts, and the run ends: it failed 3 times in a row" in output


def test_gradients_have_the_same_bits_on_any_number_of_replicas() -> None:
    """Of four shards; the fifth replica stands by, and leads."""
    data = [torch.randn(6, 5, generator=torch.Generator().manual_seed(shard)) for shard in range(4)]
    store, found = dist.HashStore(), []
    for size in (1, 2, 3, 4, 5):
        results: dict[int, Any] = {}

        def compute(rank: int, size: int = size, results: dict[int, Any] = results) -> None:
            prefixed = dist.PrefixStore(str(size), store)
            group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=20)) if size > 1 else None
            replicas = ReplicaCollectives(group, rank, size, lambda: rank == size - 1, pytest.fail)
            reduction = ShardReduction(replicas)
            model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=0.5))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.3)
            unused = nn.Linear(2, 2)
            reduction.remember_buffers([model, unused])
            plan = ElasticPlan(24, 4, size, rank, True, True, seed=0, lockstep=False)
            for shard in plan.shards(0, [0], 24, 24, 24, last=True):
                reduction.enter([model, unused], shard, calls=0)
                loss = model(data[shard.index]).pow(3).sum()
                reduction.items = 10.0 + shard.index
                reduction.backward(loss.backward)
            assert reduction.is_complete and unused.weight.grad is None
            tensors = [item.grad for item in model.parameters()] + list(model.buffers())
            results[rank] = [tensor.clone() for tensor in tensors], replicas.leaders
            reduction.undo()
            assert model[1].running_mean.eq(0).all() and model[0].weight.grad is None

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == size
        found += [tensors for tensors, leaders in results.values() if leaders == [size - 1]]
    assert len(found) == 15
    for tensors in found:
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0], strict=True))
    # The same in one sum over all items, and the mean of what the shards have added to the buffers.
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    (sum(model(part).pow(3).sum() for part in data) / (10 + 11 + 12 + 13)).backward()
    for tensor, parameter in zip(found[0], model.parameters(), strict=False):
        torch.testing.assert_close(tensor, parameter.grad)
    mean = torch.stack([0.5 * model[0](part).mean(0) for part in data]).mean(0)
    torch.testing.assert_close(found[0][4], mean)


def test_a_failed_collective_is_reported_once_and_yields_zeros() -> None:
    class Broken:
        def alltoall_base(self, *arguments: Any) -> Any:
            raise RuntimeError("connection reset")

        allgather = alltoall_base

    errors: list[Exception] = []
    replicas = ReplicaCollectives(Broken(), 0, 2, lambda: True, errors.append)
    assert replicas.all_to_all(torch.ones(4), [2, 1]).eq(0).all()
    assert replicas.all_gather(torch.ones(3)).eq(0).all()
    assert [str(error) for error in errors] == ["connection reset"]


def steps_of(recent: Recent) -> tuple[int | None, list[int]]:
    step, rows = recent.rows_to_repeat()
    return step, [row.step for row in rows]


def test_rows_that_are_repeated_are_all_after_a_step() -> None:
    recent = Recent()
    assert steps_of(recent) == (None, [])
    for step in range(100):
        recent.add(Row({"loss": step}, step, None))
        recent.add(Row({"lr": step}, step, None))
    assert steps_of(recent) == (67, [step for step in range(68, 100) for _ in range(2)])
    recent.add(Row({}, 100, None))  # forgets one row of step 68
    assert steps_of(recent) == (68, [*(step for step in range(69, 100) for _ in range(2)), 100])
    recent.add(Row({}, 3, None))  # by the epoch: rows after step 2 were forgotten
    assert steps_of(recent) == (100, [])
    recent.add(Row({}, 101, None))
    assert steps_of(recent) == (100, [101])


def test_rows_travel_to_a_replica_that_joins() -> None:
    recent, other = Recent(), Recent()
    recent.add(Row({"handle": threading.Lock()}, 1, None))
    for step in (2, 3):
        recent.add(Row({"loss": torch.tensor(0.5 * step)}, step, {"jsonl": {"more": 1}}))
    other.add(Row({}, 1, None))
    other.load(recent.dump())
    more = {"jsonl": {"more": 1}}
    assert other.rows_to_repeat() == (1, [Row({"loss": 1.0}, 2, more), Row({"loss": 1.5}, 3, more)])


def test_each_end_of_a_lighthouse_is_noticed_once() -> None:
    ends: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = LighthouseWatch(f"http://127.0.0.1:{server.getsockname()[1]}", lambda: ends.append(time.monotonic()))
        for number in range(1, 3):
            watch.begin()
            watch.begin()
            connection, _ = server.accept()
            watch.check()
            assert len(ends) == number - 1
            connection.close()
            deadline = time.monotonic() + 10
            while len(ends) < number and time.monotonic() < deadline:
                if number == 1:  # the second time the thread notices
                    watch.check()
        assert len(ends) == 2
    watch.close()


def test_without_the_launcher_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigurationError, match="`accel.*--ft --num_replicas N`"):
        Accelerator(cpu=True, strategy="ft")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_fsdp": "true"}, "use_fsdp.* cannot be combined: each replica holds the full model"),
        ({"use_fsdp": "true", "fsdp_version": "2"}, "sharded by FSDP 2. Give --use_fsdp .* more than one process"),
        ({"processes_per_replica": "2"}, "replicas of several processes are sharded by FSDP 2"),
        ({"num_processes": "4"}, "num_processes.* cannot be combined. Leave it out, and set --num_replicas"),
        ({"num_machines": "2", "rdzv_backend": "c10d"}, "rdzv_backend.* cannot be combined: the replicas meet at"),
        ({"num_machines": "1:2"}, "num_machines 1:2 and --ft cannot be combined"),
        ({"min_replicas": "4", "num_spares": "1"}, "min_replicas.* is more than all 3 replicas"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(resolve(load_groups(), {"ft": "true", **given}, environ={}))


@pytest.mark.parametrize("host", [None, "::1"])
def test_one_replica_of_two_computes_the_whole_step(
    lighthouse: None, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    if host is not None:
        monkeypatch.setenv("ACCELERATE_FT_HOST", host)
    accelerator, model, optimizer, loader = prepared()
    plain = nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = []
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        for _ in range(1 if host is None else 2):  # two losses of a batch, or one
            accelerator.backward(loss if host is None else loss / 2, retain_graph=host is not None)
        batches.append(x)
        assert accelerator.sync_gradients is (len(batches) % 2 == 0)
        optimizer.step()
        optimizer.zero_grad()
        if len(batches) % 2 == 0:
            (sum(plain(part).pow(2).mean() for part in batches[-2:]) / 2).backward()
            reference.step()
            reference.zero_grad()
    assert optimizer.steps_taken == 2 and len(batches) == 4
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    with pytest.raises(ConfigurationError, match="outside of a step that replicas share"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match=r"optimizer.step\(\)"):
        for _ in loader:
            pass
    accelerator.end_training()


def test_no_run_of_its_own_while_another_replica_is_ahead(
    lighthouse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was restarted waits for a replica that computes a step, until the launcher removes its report."""
    monkeypatch.setenv("ACCELERATE_FT_DIRECTORY", str(tmp_path))
    other = tmp_path / "replica_1"
    other.write_text("computes 7".ljust(40))
    (tmp_path / "replica_2").write_text("finished 9")
    accelerator, _, _, loader = prepared()
    threading.Timer(1.0, other.unlink).start()
    next(iter(loader))
    assert not other.exists()
    assert (tmp_path / "replica_0").read_text().split() == ["computes", "0"]
    accelerator.end_training()


def test_after_a_new_lighthouse_a_replica_waits_for_the_others(
    lighthouse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it sets up its group, though the new lighthouse gives the first quorum the same number."""
    monkeypatch.setenv("ACCELERATE_FT_DIRECTORY", str(tmp_path))
    accelerator, model, optimizer, loader = prepared()
    batches = iter(loader)
    for _ in range(2):
        accelerator.backward(model(next(batches)[0]).sum())
        optimizer.step()
    group = accelerator.strategy._group
    assert optimizer.steps_taken == 1 and group.size == 1
    former = group.pg._pg
    other = tmp_path / "replica_1"
    other.write_text("computes 0")  # it has not yet voted on the first step
    group._on_lighthouse_end()
    threading.Timer(0.5, other.unlink).start()
    next(batches)
    assert not other.exists() and group.pg._pg is not former
    accelerator.end_training()


def rows_of(folder: Path) -> list[tuple[int, Any]]:
    (run,) = (folder / "run").iterdir()
    return [(row["_step"], row["loss"]) for row in read_run(run).rows]


def test_rows_of_a_step_that_is_repeated_are_logged_once(
    lighthouse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are logged before or after optimizer.step()."""
    monkeypatch.setenv("ACCELERATE_FT_DIRECTORY", str(tmp_path))
    accelerator, model, optimizer, loader = prepared(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")
    computed = 0
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        if accelerator.sync_gradients:
            computed += 1
            accelerator.log({"loss": -computed}, step=optimizer.steps_taken)
            if computed == 1:
                accelerator.strategy._group.fail(RuntimeError("a replica was killed"))
        optimizer.step()
        if accelerator.sync_gradients:
            accelerator.log({"loss": computed}, step=optimizer.steps_taken)
    accelerator.end_training()
    assert computed == 3 and optimizer.steps_taken == 2
    assert rows_of(tmp_path) == [(0, -2), (1, 2), (1, -3), (2, 3)]


def test_a_replica_that_is_slow_to_start_continues_the_tracker_of_the_others(
    lighthouse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FT_DIRECTORY", str(tmp_path))
    first, *_ = prepared(log_with="jsonl", project_dir=tmp_path)
    first.init_trackers("run")
    first.log({"loss": 7.0}, step=1)
    first.end_training()
    accelerator, model, optimizer, loader = prepared(log_with="jsonl", project_dir=tmp_path)
    assert accelerator.is_main_process
    accelerator.init_trackers("run")
    assert not accelerator.is_main_process
    # It has the state of the others, and they die.
    accelerator.strategy._tracking.recent.load(first.strategy._tracking.recent.dump())
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        if accelerator.sync_gradients:
            accelerator.log({"loss": 8.0}, step=optimizer.steps_taken + 1)
    assert accelerator.is_main_process
    accelerator.end_training()
    assert rows_of(tmp_path) == [(1, 7.0), (2, 8.0), (3, 8.0)]


def test_averages_must_be_those_of_all_replicas(lighthouse: None) -> None:
    accelerator, model, optimizer, loader = prepared()
    state = capture(accelerator)
    average = accelerator.moving_average(model)
    with pytest.raises(ConfigurationError, match=r"1 moving average, and the others have 0\. Call moving_average"):
        restore(accelerator, state)
    with average.applied(), pytest.raises(ConfigurationError, match=r"next\(loader\) .* Leave the block of applied"):
        next(iter(loader))
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        assert average.update() == accelerator.sync_gradients
    accelerator.end_training()


def test_misuse_is_named(lighthouse: None) -> None:
    accelerator, model, _, loader = prepared()
    with pytest.raises(ConfigurationError, match="got a second optimizer"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="no_sync cannot be used"):
        accelerator.no_sync(model)
    with pytest.raises(ConfigurationError, match="outside of a loop"):
        accelerator.backward(model(torch.ones(1, 4)).sum())
    accelerator.gradient_accumulation_steps = 2
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        with pytest.raises(ConfigurationError, match="backward was called twice for a batch"):
            accelerator.backward(model(x).sum())
        break
    accelerator.end_training()
    with pytest.raises(ConfigurationError, match="mixed_precision='fp16' cannot be used"):
        Accelerator(cpu=True, strategy="ft", mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match="FaultTolerantStrategy"):
        Accelerator(cpu=True, strategy="ft", dataloader_config=DataLoaderConfiguration(elastic=True))


def test_message_of_the_launcher_without_torchft(tmp_path: Path) -> None:
    if find_spec("torchft") is not None:
        pytest.skip("torchft is installed")
    output, _ = start(tmp_path / "run", 1).communicate(timeout=100)
    assert re.search(r"--ft needs the module torchft. Install it with: pip install 'accel\[ft\]'", output)
