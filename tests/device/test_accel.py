"""What accel does with a device that another package adds: nothing in it knows a list of devices of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator
from accel.utils import ProfileKwargs, load, set_seed
from accel_state import PartialState, devices
from accel_state.context import isolated
from accel_state.errors import ConfigurationError

DEVICE = torch.device("simgpu", 0)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    with isolated():
        yield


def _trained(accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    set_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).square().sum())
    optimizer.step()
    return model, optimizer


def test_it_is_detected() -> None:
    assert devices.detect().name == "simgpu"
    assert Accelerator().device == DEVICE


def test_generators_of_the_device_can_be_named() -> None:
    assert Accelerator(rng_types=["simgpu"]).rng_types == ["simgpu"]
    with pytest.raises(ConfigurationError, match="simgpux"):
        Accelerator(rng_types=["simgpux"])


def test_the_profiler_records_it() -> None:
    for name in ("simgpu", "privateuse1", "PrivateUse1"):
        profiler = ProfileKwargs(activities=["cpu", name]).build()
        assert torch.profiler.ProfilerActivity.PrivateUse1 in profiler.activities
    with pytest.raises(ConfigurationError, match="simgpux"):
        ProfileKwargs(activities=["simgpux"]).build()


@pytest.mark.parametrize("where", ["simgpu:1", torch.device("simgpu", 1), 1, {"cpu": "simgpu:1"}], ids=str)
def test_safetensors_are_loaded_onto_it(tmp_path: Path, where: object) -> None:
    save_file({"x": torch.arange(3.0)}, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors", map_location=where)["x"]
    assert loaded.device == torch.device("simgpu", 1)
    assert loaded.tolist() == [0, 1, 2]


@pytest.mark.parametrize("map_location", ["simgpu:1", "on_device", None])
def test_load_state(tmp_path: Path, map_location: str | None) -> None:
    accelerator = Accelerator()
    model, _ = _trained(accelerator)
    saved = model.weight.detach().cpu()
    drawn = torch.rand(3, device=DEVICE)
    accelerator.save_state(tmp_path / "state")
    expected = torch.rand(3, device=DEVICE)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "state", load_kwargs=None, map_location=map_location)
    assert torch.equal(model.weight.detach().cpu(), saved)
    assert torch.equal(torch.rand(3, device=DEVICE), expected)  # the device's generator too
    assert not torch.equal(drawn, expected)


def test_a_run_on_the_cpu_leaves_it_alone() -> None:
    program = """
import torch
from accel import Accelerator
from accel.utils import set_seed
accelerator = Accelerator(cpu=True)
set_seed(1)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
import sys
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
accelerator.free_memory()
used = "torch_simgpu" in sys.modules and torch.simgpu.is_initialized()
sys.exit(9 if used else 0)
"""
    folder = Path.cwd() / "state"
    try:
        variables = {**os.environ, "ACCEL_TEST_IN_PLACE": "0"}  # this one is about the CPU
        done = subprocess.run([sys.executable, "-c", program, str(folder)], env=variables, check=False)
        assert done.returncode == 0
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()


class Marked(torch.Tensor):
    """A subclass without attributes of its own."""


@pytest.mark.parametrize("is_overwritten_first", [True, False], ids=["overwritten", "saved"])
def test_a_state_saved_in_the_background_is_copied_to_the_host(tmp_path: Path, is_overwritten_first: bool) -> None:
    """Also tensors with attributes, and of subclasses: the saving thread is not ordered after the caller's stream.

    An operation on that stream makes late copies arrive, so in one case there is none before the state is written.
    """
    accelerator = Accelerator()
    marked = torch.full((1000,), 1.0, device=DEVICE)
    marked.origin = "a test"
    subclass = torch.full((1000,), 2.0, device=DEVICE).as_subclass(Marked)

    class Registered:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"marked": marked, "subclass": subclass}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.state = state

    registered = Registered()
    accelerator.register_for_checkpointing(registered)
    torch.serialization.add_safe_globals([Marked])
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.simgpu.current_stream())
    with torch.simgpu.stream(side):
        accelerator.save_state(tmp_path / "state", blocking=False)
        if not is_overwritten_first:
            accelerator.wait_for_save()
        marked.fill_(7)
        subclass.fill_(7)
    accelerator.wait_for_save()
    torch.simgpu.current_stream().wait_stream(side)
    accelerator.load_state(tmp_path / "state")
    assert registered.state["marked"].tolist() == [1.0] * 1000
    assert registered.state["subclass"].tolist() == [2.0] * 1000


def _launch(*options: str) -> subprocess.CompletedProcess[str]:
    program = "from accel_state import PartialState as S; s = S(); print(f'{s.device} of {s.num_processes}')"
    script = Path.cwd() / "script.py"
    script.write_text(program)
    try:
        command = [sys.executable, "-m", "accel_launch", "launch", *options, str(script)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        script.unlink()


def test_the_launcher_starts_one_process_on_each() -> None:
    done = _launch("--multi_gpu")
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if " of " in line)
    assert found == [f"simgpu:{index} of 4" for index in range(4)]


def test_the_launcher_knows_how_many_there_are() -> None:
    for options in (["--multi_gpu", "--num_processes", "5"], ["--gpu_ids", "0,5"]):
        done = _launch(*options)
        assert done.returncode != 0 and "4" in done.stderr
    chosen = _launch("--gpu_ids", "1", "--num_processes", "1")
    assert "simgpu:0 of 1" in chosen.stdout, chosen.stderr


@pytest.mark.parametrize("command", ["env", "doctor"])
def test_commands_that_describe_the_machine(command: str) -> None:
    arguments = {"env": ["--json"], "doctor": ["--timeout", "100"]}[command]
    done = subprocess.run(
        [sys.executable, "-m", "accel_launch", command, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "env":
        facts = json.loads(done.stdout)
        assert facts["Visible GPUs"] == 4 and facts["PyTorch device"] == "simgpu (4)"
    else:
        assert "simgpu:1 computes correct" in done.stdout and "simccl" in done.stdout


def test_the_device_is_checked_and_reported() -> None:
    row = Path.cwd() / "row.md"
    command = [sys.executable, "-m", "accel_launch", "test", "--device", "simgpu", "--num_processes", "2"]
    done = subprocess.run([*command, "--report", str(row)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = row.read_text()
    row.unlink()
    assert "2 process(es), MULTI_GPU, simgpu:0" in done.stdout
    assert "first backward pass" not in done.stderr and "first batch" not in done.stderr
    assert report.splitlines()[-1].startswith("| simgpu, 2 processes | simccl | yes |")


def test_memory_is_that_of_the_device() -> None:
    device = devices.get("simgpu")
    before = device.memory_allocated(0)
    kept = torch.empty(1 << 20, device=DEVICE)
    assert device.memory_allocated(0) - before == 4 << 20
    assert device.memory_total(0) == 8 << 30
    del kept
    assert PartialState().device_backend is device
