"""``accel launch --ray`` on a cluster of two nodes, each of which is a host of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from components import ray_nodes, torchless
from components.ray_nodes import RayNodes
from documents import all_commands, blocks, shows
from workspace import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import kill_on_ray

from accel_monitor import make_ledger, read_runs

_MISSING = ray_nodes.missing()
pytestmark = [
    pytest.mark.component,
    pytest.mark.slow,  # a cluster of two nodes takes 10 s to start, and each launch 5 s
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "a cluster can be made"),
    pytest.mark.timeout(900),
]

SUM = """
import os, sys
from torchless import Group
group = Group()
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
print(group.sum(group.rank + 1), os.uname().nodename, *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
group.sum(0)
if "fail" in sys.argv and group.rank == 2:
    raise ValueError("broken")
if "exit" in sys.argv and group.rank == 1:
    sys.exit(7)
"""

# Counts to 12, and continues with the number that is in the file. All ranks know a number before it is written.
COUNT = """
import json, os, pathlib, sys, time
from torchless import Group
group, file = Group(), pathlib.Path("state.json")
numbers = json.loads(file.read_text()) if file.exists() else []
group.sum(0)
print("begins", len(numbers), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while len(numbers) < int(sys.argv[1]):
    numbers.append(group.sum(len(numbers) % 5))
    if group.rank == 0:
        file.with_suffix(".part").write_text(json.dumps(numbers))
        file.with_suffix(".part").replace(file)
    group.sum(0)
    print("number", len(numbers), flush=True)
    time.sleep(0.1)
"""

# Ten steps of a small model; its weights depend on each of them.
TRAIN = """
import hashlib, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, project_dir="runs")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step(); optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    weights = b"".join(state[name].detach().cpu().float().numpy().tobytes() for name in sorted(state))
    print(accelerator.distributed_type.name, losses[-1], hashlib.sha256(weights).hexdigest(), flush=True)
accelerator.end_training()
"""


# Replicas that are sharded over two processes each; "kill" ends the second process of the second replica once.
SHARDED = """
import hashlib, os, signal, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
names = ("ACCELERATE_FT_REPLICA", "RANK", "ACCELERATE_FT_RESTARTS")
torch.manual_seed(3)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 1))
loader = DataLoader(TensorDataset(torch.randn(96, 8), torch.randn(96, 1)), batch_size=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
while optimizer.steps_taken < 24:
    for x, y in loader:
        whole = accelerator.strategy._group.size == int(os.environ["ACCELERATE_FT_NUM_REPLICAS"])
        if "kill" in sys.argv and [os.environ[name] for name in names] == ["1", "1", "0"] and optimizer.steps_taken > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if not whole and optimizer.steps_taken > 4:
            time.sleep(2)  # time for those that are late, and for the dead to return
        accelerator.backward((model(x) - y).pow(2).mean())
        optimizer.step(); optimizer.zero_grad()
        if optimizer.steps_taken >= 24:
            break
state = accelerator.get_state_dict(model)
if os.environ["RANK"] == "0":
    weights = b"".join(state[name].detach().cpu().numpy().tobytes() for name in sorted(state))
    print("trained", optimizer.steps_taken, whole, hashlib.sha256(weights).hexdigest(), flush=True)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(takes_jobs=True) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torchless.copy_to(tmp_path)
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "count.py").write_text(COUNT)
    return tmp_path


def _run(nodes: RayNodes, folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    launch = nodes.launch(*words, folder=folder)
    out, err = launch.communicate(timeout=300)
    assert launch.returncode == code, f"{launch.returncode}\n{out}\n{err}"
    return out, err


def _until(launch: subprocess.Popen[str], text: str) -> None:
    assert launch.stdout is not None
    for line in launch.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not printed:\n{launch.stderr.read() if launch.stderr else ''}")


def _is_rank(command: str) -> bool:
    return "start_worker.py script" in command


def _wait_until(condition: Callable[[], bool], seconds: float = 60) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds
        time.sleep(0.1)
    return time.monotonic() - begin


def _no_ranks(nodes: RayNodes) -> bool:
    return not any(nodes.find(host, _is_rank) for host in (0, 1))


def test_the_commands_of_the_guide(nodes: RayNodes, tmp_path: Path) -> None:
    """Those that need a cluster: as they are, on one of its nodes, with its address in a variable."""
    page = "docs/guides/ray.md"
    (script,) = (block for block in blocks() if block.page == page and block.title == "ranks.py")
    (tmp_path / script.title).write_text(script.text)
    commands = [
        command for command in all_commands() if command.block.page == page and "--num_processes" in command.line
    ]
    for command in commands:
        if "--dry_run" in command.line or command.block.language != "console":
            continue
        words = [str(nodes.python), "-m", "accel_launch", *command.words[1:]]
        env = nodes.environment(RAY_ADDRESS=nodes.address)
        done = subprocess.run(
            nodes.hosts.command(0, words),
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        in_order = "".join(sorted(done.stdout.splitlines(keepends=True)))  # ranks print in any order
        texts = done.stdout, in_order, done.stderr
        assert any(shows(command.shown, text) for text in texts), f"{command}\n{done}"


def test_the_command_with_replicas(nodes: RayNodes, folder: Path) -> None:
    """That of the guide; all four replicas end with the same weights."""
    (command,) = (one for one in all_commands() if one.block.page == "docs/guides/ray.md" and " --ft " in one.line)
    (folder / "train.py").write_text(SHARDED)
    words = [str(nodes.python), "-m", "accel_launch", *command.words[1:]]
    env = nodes.environment(RAY_ADDRESS=nodes.address)
    at_head = nodes.hosts.command(0, words)
    done = subprocess.run(at_head, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done
    trained = re.findall(r"^\[replica(\d)\]: trained 24 \w+ (\w{64})$", done.stdout, re.MULTILINE)
    assert sorted(replica for replica, _ in trained) == ["0", "1", "2", "3"], f"{done.stdout}\n{done.stderr}"
    assert len({weights for _, weights in trained}) == 1, done


def test_the_doctor(nodes: RayNodes, tmp_path: Path) -> None:
    words = [str(nodes.python), "-m", "accel_launch", "doctor", "--ft", "--ray", nodes.address]
    done = nodes.run(0, words, timeout=300)
    assert re.search(r"^ok +torchft +\d", done.stdout, re.MULTILINE), done.stdout
    assert f"cluster {nodes.address} of " in done.stdout and ": 4 CPU free, of 4 CPU" in done.stdout, done.stdout
    done = nodes.run(0, [*words[:-1], f"{nodes.hosts.addresses[0]}:1"], timeout=300)
    assert done.returncode == 1 and "no Ray cluster answers at" in done.stdout, done.stdout


def test_ray_train_continues_after_a_failure(nodes: RayNodes, tmp_path: Path) -> None:
    """The ranks that Ray Train sets, a killed worker, and weights that are those of a run without a failure."""
    found = []
    for name in ("undisturbed", "killed"):
        words = [
            str(nodes.python),
            "-u",
            str(ROOT / "examples" / "ray_trainer.py"),
            "--storage",
            ".",
            "--name",
            name,
            "--epochs",
            "20",
        ]
        env = nodes.environment(RAY_ADDRESS=nodes.address)
        run = subprocess.Popen(
            nodes.hosts.command(0, words),
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if name == "killed" and "epoch 1: loss" in line:
                name = "has been killed"
                workers = [pid for host in (0, 1) for pid in nodes.find(host, lambda line: "RayTrainWorker" in line)]
                os.kill(workers[-1], signal.SIGKILL)
        text = "".join(lines)
        assert run.wait() == 0, text
        assert ("continues with epoch" in text) == (name == "has been killed"), text
        found.append(set(re.findall(r"sha256 of the weights: (\w{64})", text)))
    assert found[0] == found[1] and len(found[0]) == 1, found


def test_ranks_are_consecutive_on_a_node_and_prefixed(nodes: RayNodes, folder: Path) -> None:
    out, err = _run(nodes, folder, "--num_processes", "4", "sum.py", "--lr", "1")
    assert sorted(out.splitlines()) == [
        "[rank0]: 10 host0 0 0 0 2 4 --lr 1",
        "[rank1]: 10 host0 1 1 0 2 4 --lr 1",
        "[rank2]: 10 host1 2 0 1 2 4 --lr 1",
        "[rank3]: 10 host1 3 1 1 2 4 --lr 1",
    ]
    assert f"the Ray cluster {nodes.address} runs the ranks on host0 (ranks 0 to 1), host1 (ranks 2 to 3)" in err


def test_spread_over_machines(nodes: RayNodes, folder: Path) -> None:
    out, _ = _run(nodes, folder, "--num_processes", "2", "--num_machines", "2", "sum.py")
    assert sorted(out.splitlines()) == ["[rank0]: 3 host0 0 0 0 1 2", "[rank1]: 3 host1 1 0 1 1 2"]
    out, _ = _run(nodes, folder, "--num_processes", "2", "--num_machines", "1", "sum.py")
    assert len({line.split()[2] for line in out.splitlines()}) == 1, "on one node"


def test_exit_code_and_traceback(nodes: RayNodes, folder: Path) -> None:
    _, err = _run(nodes, folder, "--num_processes", "4", "sum.py", "exit", code=7)
    assert "rank 1 of 4 ended first with exit code 7 (local rank 1 on host0" in err
    _, err = _run(nodes, folder, "--num_processes", "4", "sum.py", "fail", code=1)
    assert "rank 2 of 4 failed first (local rank 0 on host1" in err and "ValueError: broken" in err


def test_the_directory_travels(nodes: RayNodes, folder: Path) -> None:
    (folder / "where.py").write_text("import os\nprint(os.getcwd(), os.environ['STAGE'], flush=True)\n")
    runtime = json.dumps({"working_dir": ".", "env_vars": {"STAGE": "prod"}})
    out, _ = _run(nodes, folder, "--num_processes", "2", "--ray_runtime_env", runtime, "where.py")
    assert "working_dir_files" in out and str(folder) not in out and out.count(" prod\n") == 2


_COMBINED = {
    "ddp": ("--mixed_precision", "bf16"),
    "fsdp 2": ("--use_fsdp", "--fsdp_version", "2"),
    "deepspeed": ("--use_deepspeed", "--zero_stage", "2"),
    "monitor": ("--monitor",),
    "mesh": ("--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"),
}


@pytest.mark.parametrize("name", _COMBINED)
def test_the_weights_are_those_of_two_processes_on_one_machine(nodes: RayNodes, folder: Path, name: str) -> None:
    """Losses and weights, bit by bit; a node each."""
    if name == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    (folder / "train.py").write_text(TRAIN)
    options = ("--cpu", "--num_processes", "2", *_COMBINED[name])
    out, _ = _run(nodes, folder, "--num_machines", "2", *options, "train.py")
    words = [str(nodes.python), "-m", "accel_launch", "launch", *options, "train.py"]
    here = folder / "here"
    here.mkdir()
    (here / "train.py").write_text(TRAIN)
    env = nodes.environment()
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True, timeout=300, check=True)
    (line,) = (line for line in out.splitlines() if re.search(r" [0-9a-f]{64}$", line))
    assert line.removeprefix("[rank0]: ") in done.stdout.splitlines(), f"{out}\n{done.stdout}"
    if name == "monitor":
        for place in (folder, here):
            (run,) = read_runs(place / "runs")
            assert len(run.attempts) == 2 and make_ledger(run).repeated_steps == 0


def test_too_few_resources(nodes: RayNodes, folder: Path) -> None:
    begin = time.monotonic()
    _, err = _run(nodes, folder, "--num_processes", "5", "--ray_timeout", "3", "sum.py", code=2)
    assert time.monotonic() - begin < 30 * float(os.environ.get("ACCEL_TEST_PATIENCE", "1"))
    assert "no room for 5 processes, with 1 CPU each" in err
    assert "Free: 4 CPU, of 4 CPU. Its nodes have: host0: 2 CPU; host1: 2 CPU." in err
    _, err = _run(nodes, folder, "--num_processes", "3", "--num_machines", "3", "--ray_timeout", "1", "sum.py", code=2)
    assert "no room for 3 processes, 1 on each of 3 nodes" in err


def test_a_killed_rank_is_named(nodes: RayNodes, folder: Path) -> None:
    launch = nodes.launch("--num_processes", "4", "count.py", "100", folder=folder)
    _until(launch, "number 3")
    os.kill(nodes.find(1, _is_rank)[0], signal.SIGKILL)
    _, err = launch.communicate(timeout=120)
    assert launch.returncode == 137 and "of 4 was ended by SIGKILL (local rank" in err and "on host1" in err
    assert _no_ranks(nodes)


def test_a_killed_actor_and_a_restart(nodes: RayNodes, folder: Path) -> None:
    launch = nodes.launch("--num_processes", "4", "--max_restarts", "1", "count.py", "12", folder=folder)
    _until(launch, "number 3")
    os.kill(nodes.find(1, lambda command: "ray::RankActor" in command)[0], signal.SIGKILL)
    out, err = launch.communicate(timeout=300)
    assert launch.returncode == 0, err
    assert "Its actor on Ray was lost: " in err and "starting all processes again (restart 1 of 1)" in err
    begins = [line.split() for line in out.splitlines() if "begins" in line]
    assert len(begins) == 4 and {words[-1] for words in begins} == {"1"} and int(begins[0][2]) >= 3
    assert json.loads((folder / "state.json").read_text()) == [4 * (n % 5) for n in range(12)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(nodes: RayNodes, folder: Path, number: signal.Signals) -> None:
    launch = nodes.launch("--num_processes", "4", "count.py", "200", folder=folder)
    _until(launch, "number 3")
    os.kill(nodes.find(0, lambda command: "accel_launch launch" in command)[-1], number)
    out, err = launch.communicate(timeout=120)
    assert launch.returncode == 128 + number, f"{out}\n{err}"
    assert f"accel launch: ended by {number.name}" in err and _no_ranks(nodes)
    # What it had is free again.
    _run(nodes, folder, "--num_processes", "4", "sum.py")


def test_a_killed_launcher_leaves_nothing(nodes: RayNodes, folder: Path) -> None:
    """A cancelled job: ``ray job stop`` kills a launcher that has not ended 3 s after its SIGTERM."""
    launch = nodes.launch("--num_processes", "4", "count.py", "300", folder=folder)
    _until(launch, "number 3")
    os.kill(nodes.find(0, lambda command: "accel_launch launch" in command)[-1], signal.SIGKILL)
    launch.communicate(timeout=60)
    assert _wait_until(lambda: _no_ranks(nodes)) < 30


def test_a_killed_node_and_its_return(nodes: RayNodes, folder: Path) -> None:
    words = ("--num_processes", "4", "--max_restarts", "1", "--machine_timeout", "5", "--ray_timeout", "120")
    launch = nodes.launch(*words, "count.py", "12", folder=folder)
    _until(launch, "number 3")
    nodes.kill_node(1)
    time.sleep(5)
    nodes.start_node(1)
    out, err = launch.communicate(timeout=300)
    assert launch.returncode == 0, err
    # Ray notices the node after seconds; until then, a rank on the other one may say that its peer is gone.
    assert "(restart 1 of 1)" in err, err
    assert out.count("restart 1") == 4
    assert json.loads((folder / "state.json").read_text()) == [4 * (n % 5) for n in range(12)]


def test_a_killed_node_that_does_not_return(nodes: RayNodes, folder: Path) -> None:
    words = ("--num_processes", "4", "--max_restarts", "1", "--machine_timeout", "1", "--ray_timeout", "2")
    launch = nodes.launch(*words, "count.py", "100", folder=folder)
    _until(launch, "number 3")
    nodes.kill_node(1)
    try:
        _, err = launch.communicate(timeout=300)
        assert launch.returncode == 1, err
        assert "the processes cannot be started again: the Ray cluster" in err
        assert "Free: 2 CPU, of 2 CPU. Its nodes have: host0: 2 CPU." in err
    finally:
        nodes.start_node(1)


def test_replicas_are_restarted_alone(nodes: RayNodes) -> None:
    """A small draw of benchmarks/kill_on_ray.py: a process, an actor, a stopped process and a node."""
    result = kill_on_ray.measure(nodes, seed=3, steps=60, count=4, restarts=False, pause=3.0)
    assert not result.problems, "\n".join([*result.problems, result.log])
    # A node that is killed shortly before the end may not be missed.
    assert "its actor on Ray was lost" in result.log, result.log
    assert "makes no progress; killing it" in result.log, result.log
    assert all(result.row[1:5]), "every kind of kill, and how long the next step took"


def test_replicas_of_several_processes_end_on_a_signal(nodes: RayNodes, folder: Path) -> None:
    (folder / "wait.py").write_text(
        "import os, time\n"
        "names = ('ACCELERATE_FT_REPLICA', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')\n"
        "print(*(os.environ[name] for name in names), os.uname().nodename, flush=True)\ntime.sleep(300)\n"
    )
    words = ("--ft", "--num_replicas", "2", "--processes_per_replica", "2", "--use_fsdp", "--fsdp_version", "2")
    launch = nodes.launch(*words, "--num_machines", "2", "--cpu", "wait.py", folder=folder)
    assert launch.stdout is not None
    lines = sorted(launch.stdout.readline() for _ in range(4))
    hosts = [line.split()[-1] for line in lines]
    assert [line.rsplit(maxsplit=1)[0] for line in lines] == [
        f"[replica{replica} rank{rank}]: {replica} {rank} 2 {rank} 127.0.0.1" for replica in (0, 1) for rank in (0, 1)
    ]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3], "the processes of a replica are on one node"
    os.kill(nodes.find(0, lambda command: "accel_launch launch" in command)[-1], signal.SIGTERM)
    _, err = launch.communicate(timeout=120)
    assert launch.returncode == 143 and "accel launch: ended by SIGTERM" in err, err
    assert _no_ranks(nodes)


def test_sharded_replicas_are_restarted_as_a_whole(nodes: RayNodes, folder: Path) -> None:
    """Both replicas of two processes end with the weights of an undisturbed run on one machine without Ray."""
    (folder / "sharded.py").write_text(SHARDED)
    words = ("--ft", "--num_replicas", "2", "--processes_per_replica", "2", "--use_fsdp", "--fsdp_version", "2")
    options = ("--cpu", *words, "--replica_timeout", "60", "--heartbeat_timeout", "5")
    command = [str(nodes.python), "-m", "accel_launch", "launch", *options, "sharded.py"]
    env = nodes.environment()
    alone = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert alone.returncode == 0, alone.stderr
    out, err = _run(nodes, folder, "--num_machines", "2", *options, "sharded.py", "kill")
    assert err.count("replica 1 ended (SIGKILL); restarting it, the others continue") == 1, err
    expected, found = (set(re.findall(r"trained .*", text)) for text in (alone.stdout, out))
    assert found == expected and len(found) == 1 and " 24 True " in found.pop(), f"{alone.stdout}\n{out}\n{err}"
    assert out.count("trained") == 2, out


# Trains until it is told to stop, and saves its state.
SAVE = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, ProjectConfiguration
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, save_on_signal=True, project_config=project)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean())
        optimizer.step(); optimizer.zero_grad()
    time.sleep(4)  # longer than Ray waits by default
    print("step", optimizer.steps_taken, flush=True)
"""


def _job(nodes: RayNodes, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(nodes.python), "-m", "ray.scripts.scripts", "job", verb, "--address", "http://127.0.0.1:8265"]
    return nodes.run(0, [*command, *words], timeout=300)


def test_jobs_that_are_submitted_and_stopped(nodes: RayNodes, folder: Path) -> None:
    """`ray job submit` of a launch, and `ray job stop` where Ray waits for as long as the guide says."""
    (folder / "save.py").write_text(SAVE)
    launch = [str(nodes.python), "-m", "accel_launch", "launch", "--ray", "--cpu", "--num_processes", "2"]
    common = ("--working-dir", str(folder), "--submission-id")
    done = _job(nodes, "submit", *common, "fails", "--", *launch, "sum.py", "exit")
    assert done.returncode == 1 and "command failed with exit code 7" in done.stdout + done.stderr, done
    states = folder / "states"
    _job(nodes, "submit", "--no-wait", *common, "stopped", "--", *launch, "save.py", str(states))
    _wait_until(lambda: "step 1" in _job(nodes, "logs", "stopped").stdout, 240)
    done = _job(nodes, "stop", "stopped")
    assert "was stopped" in done.stdout + done.stderr, done
    said = _job(nodes, "logs", "stopped").stdout
    assert f"accel launch: the training was saved to {states}/checkpoints/checkpoint_0 on a signal." in said, said
    assert (states / "checkpoints" / "checkpoint_0").is_dir() and _no_ranks(nodes)


def test_a_package_travels(nodes: RayNodes, folder: Path) -> None:
    """Ray makes an environment for it; the ranks run in that one."""
    wheel = folder / "brought-1.0-py3-none-any.whl"
    info = "brought-1.0.dist-info"
    files = {
        "brought.py": "VALUE = 41\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    (folder / "package.py").write_text("import brought\nprint('brought', brought.VALUE, flush=True)\n")
    pip = {"packages": [str(wheel)], "pip_install_options": ["--no-index", "--no-deps"]}
    words = ("--num_processes", "2", "--ray_runtime_env", json.dumps({"pip": pip}))
    out, _ = _run(nodes, folder, *words, "package.py")
    assert sorted(out.splitlines()) == ["[rank0]: brought 41", "[rank1]: brought 41"]
