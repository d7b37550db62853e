"""Launching on an XLA device: accel launch --tpu, accel test, notebook_launcher, accel doctor, and missing devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import xla_runs
from forks import call_alone, run_alone

from accel_state.testing import WorldError

pytest.importorskip("torch_xla", reason="scripts/test-xla makes an environment with torch_xla")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each test starts processes that import torch_xla
ROOT = Path(__file__).parents[1]
CPU = {"PJRT_DEVICE": "CPU"}
SCRIPT = """
import os
import torch
from accel import Accelerator, notebook_launcher

def main(model=None, tensor=None):
    accelerator = Accelerator()
    if model is None:
        model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.sum().item()
    accelerator.backward(model(torch.ones(4, 2, device=accelerator.device)).sum())
    optimizer.step()
    half = torch.tensor([1 / 3], device=accelerator.device)
    words = [accelerator.device, accelerator.distributed_type, accelerator.num_processes, accelerator.mixed_precision,
        type(accelerator.strategy).__name__, f"{model.weight.sum().item() - before:.2f}", f"{half.item():.6f}"]
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    accelerator.end_training()
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "s.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def accel(folder):
    """Commands, in processes of their own."""

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), **CPU, **variables}
        command = [sys.executable, "-m", "accel_launch", *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
        )

    return call


def printed_by(code: str, folder: Path, **variables: str) -> str:
    """What code prints in a process that has imported torch, and not yet torch_xla."""
    printed: str = call_alone(
        xla_runs.printed_by, code, str(folder), seconds=280, **{"HF_HOME": str(folder), **CPU, **variables}
    )
    return printed


def test_launch_starts_a_process_for_each_device(accel) -> None:
    result = accel("launch", "--tpu", "--num_processes=8", "--mixed_precision=bf16", "--downcast_bf16", "s.py")
    assert result.returncode == 0, result.stderr
    # XLA_DOWNCAST_BF16: a third has 8 bits.
    *words, change, third = result.stdout.splitlines()[-1].split()
    assert words == "xla:0 XLA 1 bf16 XlaStrategy".split() and third == "0.333984", result.stdout
    assert float(change) == pytest.approx(-0.8, abs=0.03)
    assert "one process for each chip" in result.stderr


def test_launch_shards_over_the_devices_of_one_process(accel) -> None:
    words = ("--use_parallelism_config", "--parallelism_config_dp_shard_size=2")
    result = accel("launch", "--tpu", *words, "s.py", CPU_NUM_DEVICES="2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["xla:0 XLA 1 no XlaSpmdStrategy -0.80 0.333333"], result.stdout


def test_replicas_that_are_threads_are_refused(folder) -> None:
    with pytest.raises(WorldError, match="2 replicas as threads of this process"):
        printed_by("import s; s.notebook_launcher(s.main)", folder, CPU_NUM_DEVICES="2")


def test_the_self_test(accel) -> None:
    result = accel("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "training equal to plain PyTorch" in result.stdout, result.stdout


def test_a_notebook(folder) -> None:
    """The model is created once, in the notebook; a lock cannot be pickled, so it is inherited by the fork."""
    printed = printed_by(
        "import threading, torch, s; from accel import notebook_launcher; lock = threading.Lock()\n"
        "def train(model):\n    with lock: s.main(model)\n"
        "notebook_launcher(train, (torch.nn.Linear(2, 1),))\n"
        "import torch_xla; torch.ones(1, device=torch_xla.device())\n"
        "try: notebook_launcher(train, (None,))\n"
        "except Exception as error: print(error)",
        folder,
    )
    first, trained, refused = printed.splitlines()
    assert first == "Launching training on all TPU chips." and trained.startswith("xla:0 XLA 1 no XlaStrategy -0.80")
    assert "this process already uses an XLA device" in refused and "Restart the notebook" in refused


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE=TPU needs libtpu"),
        ({"PJRT_DEVICE": "GPU"}, "PJRT_DEVICE=GPU is not a device of torch_xla. Set it to one of TPU, CPU"),
        ({"PJRT_DEVICE": "", "XRT_TPU_CONFIG": "tpu_worker;0;10.0.0.2:8470"}, "set PJRT_DEVICE=TPU"),
    ],
)
def test_a_device_that_is_missing(folder, variables, says) -> None:
    with pytest.raises(WorldError) as caught:
        printed_by("import s; s.main()", folder, **variables)
    assert says in caught.value.reports[0].splitlines()[-1], caught.value
    if variables == {"PJRT_DEVICE": "TPU"}:
        code, printed = call_alone(xla_runs.doctor, "--num_processes=1", **variables)
        assert code != 0 and says in " ".join(printed.split()), printed


@pytest.mark.parametrize("size", [1, 4])
def test_the_example(folder, size) -> None:
    script = ROOT / "examples" / "xla.py"
    printed = run_alone(script, f"--dp_shard_size={size}", folder=folder, CPU_NUM_DEVICES=str(size), **CPU)
    shown = (ROOT / "docs" / "guides" / "tpu.md").read_text()
    assert printed in shown, f"docs/guides/tpu.md shows another output than {printed}"
