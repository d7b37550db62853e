"""Replicas that are killed: real processes, torchft's lighthouse, and the weights of a run that nobody killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.fault_tolerance.shard_reduction import shards_of, sum_shards
from accel_state.errors import ConfigurationError
from accel_state.options import check, load_groups, resolve
from accel_track.jsonl_reader import read_run

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft: pip install 'accel[ft]'")

# Events are REPLICA:STEP:WHAT. Each happens once, in the middle of a step that all replicas compute.
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

while optimizer.steps_taken < total:
    for x, y, ids in loader:
        with accelerator.accumulate(model):
            weights = (ids % 3 + 1).float()
            loss = ((model(x) - y).pow(2).squeeze(1) * weights).sum()
            accelerator.backward(loss, num_items=weights.sum(), reduction="sum")
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                act()
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            records.write(json.dumps([optimizer.steps_taken, ids.tolist()]) + "\\n")
            (folder / f"step.{number}").write_text(str(optimizer.steps_taken))
            if optimizer.steps_taken % 40 == 0:
                accelerator.save_state()
        if accelerator.sync_gradients:
            accelerator.log({"lr": scheduler.get_last_lr()[0]}, step=optimizer.steps_taken)
            if accelerator.strategy._group.size < replicas and optimizer.steps_taken > 4:
                time.sleep(0.3)  # time for the dead to return
            if optimizer.steps_taken >= total:
                break
digest = hashlib.sha256(b"".join(item.numpy().tobytes() for item in model.state_dict().values())).hexdigest()
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


@needs_torchft
@pytest.mark.slow  # two runs of several processes, which are killed and import torch again: half a minute
@pytest.mark.timeout(300)
def test_killed_replicas_change_nothing(tmp_path: Path) -> None:
    """A replica is killed, then the one that leads, one hangs, one is stopped, and the lighthouse dies."""
    steps = 120
    quiet = start(tmp_path / "quiet", steps)
    finish(quiet, 120)
    events = ("1:12:SIGKILL", "0:24:SIGKILL", "1:36:SIGSTOP", "0:48:HANG")
    folder = tmp_path / "killed"
    run = start(folder, steps, "--replica_timeout", "3", EVENTS=",".join(events))
    ended_lighthouse = threading.Event()

    def end_lighthouse() -> None:
        while run.poll() is None and not any(len(file.read_text()) == 3 for file in folder.glob("step.*")):
            time.sleep(0.02)  # before step 100
        for child in psutil.Process(run.pid).children():
            if "LighthouseServer" in " ".join(child.cmdline()):
                child.kill()
                ended_lighthouse.set()

    killer = threading.Thread(target=end_lighthouse)
    killer.start()
    output = finish(run, 200)
    killer.join()
    assert ended_lighthouse.is_set()
    assert all((folder / event).exists() for event in events), output
    assert "replica 1 ended (SIGKILL); restarting it, the others go on" in output
    assert output.count("makes no progress; killing it") == 2 and "the lighthouse ended (SIGKILL)" in output
    ends = [json.loads(file.read_text()) for file in (tmp_path / "quiet").glob("end.*")]
    assert len(ends) == 2 and ends[0] == ends[1] and ends[0][1] == steps
    # On a machine with much other work the last one that was killed may not have returned in time.
    found = [json.loads(file.read_text()) for file in folder.glob("end.*")]
    assert found and all(end == ends[0] for end in found)
    # One run in the tracker, with each step once.
    expected = tracked(tmp_path / "quiet")
    assert list(expected) == list(range(1, steps + 1))
    assert tracked(folder) == expected
    # Every state is there, and holds the weights of that step.
    for number in range(3):
        states = [each / "project" / "checkpoints" / f"checkpoint_{number}" for each in (tmp_path / "quiet", folder)]
        weights = [(state / "model.safetensors").read_bytes() for state in states]
        assert weights[0] == weights[1]


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
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, DataLoader(data, batch_size=3))
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
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            if accelerator.strategy._group.size < 2 and optimizer.steps_taken > 4:
                time.sleep(0.5)  # time for the dead to return
            if optimizer.steps_taken == total - 4:
                accelerator.save_state()
        if optimizer.steps_taken >= total:
            break
weights = accelerator.get_state_dict(model)
if rank == "0":
    torch.save((weights, optimizer.steps_taken, scheduler.get_last_lr()), folder / f"end.{number}")
accelerator.end_training()
"""


def trained_whole(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights that SHARDED trains, in one process."""
    weights, (x, y, ids) = torch.load(folder / "begin.0.0.0")
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 1))
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        part = slice(step % 4 * 24, step % 4 * 24 + 24)
        items = (ids[part] % 3 + 1).float()
        loss = ((model(x[part]) - y[part]).pow(2).squeeze(1) * items).sum() / items.sum()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.99 ** (4 * step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@needs_torchft
@pytest.mark.slow  # two replicas of two processes, each started twice
@pytest.mark.timeout(300)
def test_sharded_replicas_are_restarted_as_a_whole(tmp_path: Path) -> None:
    """A process of a replica is killed, then one of the replica that leads."""
    steps = 24
    words = ("--use_fsdp", "--fsdp_version", "2", "--processes_per_replica", "2", "--replica_timeout", "3")
    output = finish(start(tmp_path, steps, *words, script=SHARDED), 200)
    assert len(re.findall(r"replica \d ended \(SIGKILL\); restarting it, the others go on", output)) == 2, output
    expected = trained_whole(tmp_path, steps)
    ends = [torch.load(file) for file in tmp_path.glob("end.*")]
    assert ends, output
    for weights, taken, (rate,) in ends:
        assert taken == steps and rate == pytest.approx(0.1 * 0.99 ** (4 * steps))
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert len(list((tmp_path / "project" / "checkpoints").iterdir())) == 1


@needs_torchft
@pytest.mark.slow  # starts three times two processes
def test_a_script_that_fails_ends_the_run(tmp_path: Path) -> None:
    run = start(tmp_path / "run", 1, script="import sys; sys.exit(3)")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 3
    assert "ended (exit code 3) after 2 restarts, and the run ends: it failed 3 times in a row" in output


def test_the_sum_of_shards_has_the_same_bits_on_any_number_of_replicas() -> None:
    shards, length = 4, 1003
    vectors = {shard: torch.randn(length, generator=torch.Generator().manual_seed(shard)) for shard in range(shards)}
    notes = {shard: torch.tensor([shard + 0.5, 1e300], dtype=torch.float64) for shard in range(shards)}
    like = torch.empty(length)
    total, about = sum_shards(None, 0, 1, shards, vectors, notes, like, 2)
    assert torch.equal(total, ((vectors[0] + vectors[1]) + vectors[2]) + vectors[3])
    assert torch.equal(about, torch.stack(list(notes.values())))
    store = dist.HashStore()
    for size in (2, 3, 5):
        results: dict[int, Any] = {}

        def compute(rank: int, size: int = size, results: dict[int, Any] = results) -> None:
            prefixed = dist.PrefixStore(str(size), store)
            group = dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=20))
            mine = shards_of(rank, size, shards)
            chosen = {shard: vectors[shard] for shard in mine}, {shard: notes[shard] for shard in mine}
            results[rank] = sum_shards(group, rank, size, shards, *chosen, like, 2)

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == size
        assert all(torch.equal(one[0], total) and torch.equal(one[1], about) for one in results.values())


def test_without_the_launcher_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigurationError, match="Start the script with `accel launch --ft --num_replicas N`"):
        Accelerator(cpu=True, strategy="ft")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_fsdp": "true"}, "use_fsdp.* cannot be combined: each replica holds the full model"),
        ({"use_fsdp": "true", "fsdp_version": "2"}, "sharded by FSDP 2. Give --use_fsdp .* more than one process"),
        ({"processes_per_replica": "2"}, "replicas of several processes are sharded by FSDP 2"),
        ({"num_processes": "4"}, "num_processes.* cannot be combined. Leave it out, and set --num_replicas"),
        ({"num_machines": "2", "rdzv_backend": "c10d"}, "rdzv_backend.* cannot be combined: the replicas meet at"),
        ({"num_machines": "1:2"}, "num_machines 1:2: machines join"),
        ({"min_replicas": "4", "num_spares": "1"}, "min_replicas.* is more than all 3 replicas"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(resolve(load_groups(), {"ft": "true", **given}, environ={}))


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lighthouse in this process, and the environment of the only replica of two that is alive."""
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft: pip install 'accel[ft]'")
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=300
    )
    for name, value in {
        "TORCHFT_LIGHTHOUSE": server.address(),
        "ACCELERATE_FT_NUM_REPLICAS": "2",
        "ACCELERATE_FT_REPLICA_TIMEOUT": "5",
        "RUST_LOG": "error",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()


def prepared(**settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy="ft", **settings)
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader))


def test_one_replica_of_two_computes_the_whole_step(lighthouse: Any) -> None:
    accelerator, model, optimizer, loader = prepared()
    plain = nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = []
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
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
    with pytest.raises(ConfigurationError, match="without a batch that was dealt"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match=r"optimizer.step\(\) was not called. Call it for every batch"):
        for _ in loader:
            pass
    accelerator.end_training()


def test_no_run_of_its_own_while_another_replica_is_ahead(
    lighthouse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_misuse_is_named(lighthouse: Any) -> None:
    accelerator, model, _, loader = prepared()
    with pytest.raises(ConfigurationError, match="got a second optimizer"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="no_sync cannot be used"):
        accelerator.no_sync(model)
    (x,) = next(iter(loader))
    accelerator.backward(model(x).sum())
    with pytest.raises(ConfigurationError, match="backward was called twice for a batch"):
        accelerator.backward(model(x).sum())
    accelerator.end_training()
    with pytest.raises(ConfigurationError, match="mixed_precision='fp16' cannot be used"):
        Accelerator(cpu=True, strategy="ft", mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match="FaultTolerantStrategy has steps of its own"):
        Accelerator(cpu=True, strategy="ft", dataloader_config=DataLoaderConfiguration(elastic=True))


def test_message_of_the_launcher_without_torchft(tmp_path: Path) -> None:
    if find_spec("torchft") is not None:
        pytest.skip("torchft is installed")
    output, _ = start(tmp_path / "run", 1).communicate(timeout=100)
    assert re.search(r"--ft needs the module torchft. Install it with: pip install 'accel\[ft\]'", output)
