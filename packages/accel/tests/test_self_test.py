"""``accel test`` passes if everything is right, and fails if a result is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from accel import Accelerator
from accel.self_test import checks, device_checks
from accel.self_test.device_checks import DEVICE_CHECKS
from accel_launch.cli import main
from accel_state.devices.cpu import CpuDevice
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(300)  # a launch of two ranks, which a busy machine keeps waiting


def accel_test(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    command = [sys.executable, "-m", "accel_launch", "test", *words]
    return subprocess.run(
        command, env={**kept, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow  # a second self-test in two ranks; test_all_checks_pass is in the fast tier
def test_the_configuration_decides_what_is_tested(tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n")
    result = accel_test("--config_file", str(config))
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "2 process(es), MULTI_CPU, cpu" and lines[-1].startswith("The self-test passed")
    assert [line.partition(" (")[0] for line in lines[1:-1]] == [f"ok  {name}" for name in checks.CHECKS]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--config_file", "none.yaml"], "none.yaml"),
        pytest.param(["--device", "gpux", "--cpu"], "gpux", marks=pytest.mark.slow),  # the script starts
        (["--report", "missing/row.md"], "there is no directory"),
    ],
)
def test_options_that_are_not_possible_are_reported(words, named, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--num_processes", "1", *words]) != 0
    out, err = capfd.readouterr()
    assert named in err and "passed" not in out


def broken_gradients() -> list[str]:
    """A rank scales its gradients."""
    accelerator = Accelerator(cpu=True)
    backward = accelerator.backward
    factor = 1.5 if accelerator.process_index == 1 else 1.0
    accelerator.backward = lambda loss: backward(loss * factor)  # type: ignore[method-assign]
    return failures(accelerator, checks.check_training)


def changed_weights() -> list[str]:
    """load_state does not restore the weights."""
    accelerator = Accelerator(cpu=True)
    accelerator.load_state = lambda folder: None  # type: ignore[method-assign]
    return failures(accelerator, checks.check_checkpoint)


def lost_samples() -> list[str]:
    """gather_for_metrics loses a sample."""
    accelerator = Accelerator(cpu=True)
    accelerator.gather_for_metrics = lambda batch: batch[1:]  # type: ignore[method-assign]
    return failures(accelerator, checks.check_loaders)


def main_process_last() -> list[str]:
    """A rank enters before the main process."""
    accelerator = Accelerator(cpu=True)

    @contextmanager
    def wrong_way_round() -> Iterator[None]:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()
        yield
        if not accelerator.is_main_process:
            accelerator.wait_for_everyone()

    accelerator.main_process_first = wrong_way_round  # type: ignore[method-assign]
    return failures(accelerator, checks.check_process_control)


def clocks_apart() -> list[str]:
    """The clock of rank 1 is an hour slow, as on another node."""
    accelerator = Accelerator(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda real=time.time: real() - 3600 * accelerator.process_index)
        return failures(accelerator, checks.check_process_control)


def failures(accelerator: Accelerator, check) -> list[str]:
    try:
        check(accelerator)
    except checks.SelfTestError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (broken_gradients, "the weights differ by"),
        (changed_weights, "weights after load_state"),
        (lost_samples, "samples of epoch 0"),
        (main_process_last, "let rank 1 enter before rank 0"),
    ],
)
def test_wrong_results_are_detected(world, says) -> None:
    for found in run_world(world, 2):
        assert len(found) == 1 and says in found[0]


def test_clock_differences_do_not_matter() -> None:
    assert run_world(clocks_apart, 2) == [[], []]


def test_all_checks_pass() -> None:
    def check() -> list[list[str]]:
        return [failures(Accelerator(cpu=True), check) for check in checks.CHECKS.values()]

    assert check() == [[]] * len(checks.CHECKS)
    assert torch.get_default_dtype() is torch.float32


def test_a_script_is_not_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["extra.py"], ["--cpu", "extra.py"], ["-m", "extra.py"]):
        assert main(["test", *words]) == 2
        assert "'extra.py' is not an option: accel test runs its own script" in capsys.readouterr().err


def test_a_device_is_checked_and_reported(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--num_processes", "1", "--report", str(tmp_path / "row.md")]
    assert main(["test", *words]) == 0
    said = capfd.readouterr().out
    assert all(f"ok  {name}" in said for name in [*DEVICE_CHECKS, *checks.CHECKS])
    row = (tmp_path / "row.md").read_text().splitlines()[-1]
    assert (
        row.startswith("| cpu, 1 process | none | yes | `accel test --device cpu`: identity, memory")
        and row.count("|") == 5
    )


class ForgetsSeeds(CpuDevice):
    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, as a plug-in that does not pass the seed on."""


class ForgetsStates(CpuDevice):
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Do nothing."""


class HasNoMemory(CpuDevice):
    def memory_free(self, index: int = 0) -> int:
        return self.memory_total(index) + 1


@pytest.mark.parametrize(
    ("device", "check"), [(ForgetsSeeds, "generators"), (ForgetsStates, "generators"), (HasNoMemory, "memory")]
)
def test_a_device_that_does_not_do_what_it_says_fails(monkeypatch, device, check) -> None:
    monkeypatch.setattr(device_checks, "device_of", lambda accelerator: device())
    with pytest.raises(checks.SelfTestError):
        DEVICE_CHECKS[check](Accelerator(cpu=True))
