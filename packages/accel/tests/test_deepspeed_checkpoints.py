"""Checkpoints of DeepSpeed engines: exact resuming, another number of ranks, and damaged files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import (
    MISSING,
    STEPS,
    STOP,
    TOLERANCE,
    adagrad,
    adamw,
    groups,
    loop,
    loss_of,
    net,
    plain,
    prepared,
    release,
    weights_of,
)
from safetensors.torch import load_file

from accel_state.errors import ConfigurationError
from accel_state.testing import WorldError, run_world

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "deepspeed is installed"), pytest.mark.timeout(600)]
STAGES = (0, 1, 2, 3)


def save_and_resume(folder: str, stages: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    results = {}
    for stage in stages:
        parts = prepared(stage)
        full = loop(parts, f"{folder}/{stage}")
        weights = weights_of(parts[0].get_state_dict(parts[1]))
        parts[0].save_model(parts[1], f"{folder}/{stage}/model")
        # Into engines that have trained, and into new ones.
        parts[0].load_state(f"{folder}/{stage}/waiting")
        again = loop(parts, begin=STOP)
        release(parts[0])
        parts = prepared(stage, seed=1)
        parts[0].load_state(f"{folder}/{stage}/beside")
        resumed = loop(parts, begin=STOP)
        results[stage] = {
            "full": full,
            "again": again,
            "resumed": resumed,
            "weights": weights,
            "steps": parts[2].steps_taken,
        }
        release(parts[0])
    return results


def resume_only(folder: str, stages: tuple[int, ...]) -> dict[int, list[float]]:
    results = {}
    for stage in stages:
        parts = prepared(stage, seed=1)
        parts[0].load_state(f"{folder}/{stage}/waiting")
        results[stage] = loop(parts, begin=STOP)
        release(parts[0])
    return results


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("states")
    return folder, run_world(save_and_resume, 2, str(folder), STAGES, timeout=500)[0]


@pytest.mark.slow  # starts DeepSpeed's engines for each stage; test_windows trains with them in the fast tier
@pytest.mark.parametrize("stage", STAGES)
def test_resuming_is_exact(saved: tuple[Path, dict[int, dict[str, Any]]], stage: int) -> None:
    folder, results = saved
    found = results[stage]
    assert len(found["full"]) == STEPS and found["steps"] == STEPS
    # The same numbers to the last bit.
    assert found["again"] == found["full"][STOP:]
    assert found["resumed"] == found["full"][STOP:]
    weights = load_file(folder / str(stage) / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in found["weights"].items()) and set(weights) == set(
        found["weights"]
    )


def resume_with_an_optimizer_of_another_form(folder: str) -> dict[int, tuple[list[float], list[float]]]:
    found = {}
    for stage in (1, 3):
        parts = prepared(stage, make=adagrad)
        full = loop(parts, f"{folder}/{stage}")
        release(parts[0])
        parts = prepared(stage, seed=1, make=adagrad)
        parts[0].load_state(f"{folder}/{stage}/waiting")
        found[stage] = full[STOP:], loop(parts, begin=STOP)
        release(parts[0])
    return found


@pytest.mark.slow  # starts DeepSpeed's engines twice in two ranks; test_windows trains with them in the fast tier
def test_resumed_schedulers_reach_a_replaced_optimizer(tmp_path: Path) -> None:
    """Loading creates new parameter groups in the engine's optimizer, which is not the script's."""
    for stage, (full, resumed) in run_world(resume_with_an_optimizer_of_another_form, 2, str(tmp_path), timeout=500)[
        0
    ].items():
        assert resumed == full, stage


@pytest.mark.slow  # needs the checkpoints of test_resuming_is_exact
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_script(saved: tuple[Path, dict[int, dict[str, Any]]], stage: int, tmp_path: Path) -> None:
    """The script in the checkpoint recovers fp32 weights, equal to those of plain PyTorch."""
    folder = saved[0] / str(stage) / "waiting"
    command = [sys.executable, folder / "zero_to_fp32.py", folder, tmp_path / "whole"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-2000:]
    weights = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    expected = plain(frozen=True, steps=STOP)["weights"]
    assert set(weights) == set(expected)
    assert max((weights[name] - value).abs().max().item() for name, value in expected.items()) < TOLERANCE


@pytest.mark.slow  # needs the checkpoints of test_resuming_is_exact
def test_resuming_on_another_number_of_ranks(saved: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    folder, results = saved
    found = run_world(resume_only, 1, str(folder), STAGES, timeout=500)[0]
    for stage, losses in found.items():
        assert losses == pytest.approx(results[stage]["full"][STOP:], abs=TOLERANCE), stage
        assert sorted(path.name for path in (folder / str(stage)).iterdir()) == ["beside", "model", "waiting"]


def load(folder: str, stage: int) -> None:
    parts = prepared(stage)
    parts[0].load_state(folder)


def load_with_ddp(folder: str) -> None:
    from accel import Accelerator

    accelerator = Accelerator()
    model = net()
    accelerator.prepare(model, adamw(groups(model)))
    accelerator.load_state(folder)


@pytest.mark.slow  # needs checkpoints of DeepSpeed's engines; damaged files of other strategies are fast
def test_damaged_and_foreign_checkpoints(saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path) -> None:
    folder = saved[0] / "2" / "waiting"
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", folder, damaged], check=True)
    part = damaged / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(WorldError, match=r"pytorch_model/zero_pp_rank_1_mp_rank_00_optim_states\.pt"):
        run_world(load, 2, str(damaged), 2, timeout=250)
    with pytest.raises(WorldError, match="was saved by DeepSpeed"):
        run_world(load_with_ddp, 1, str(folder), timeout=250)


def save_in_a_window(folder: str) -> tuple[bool, str]:
    accelerator, model, optimizer, _, loader = prepared(2, gradient_accumulation_steps=4)
    x, y = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
    accelerator.save_state(folder)
    with pytest.raises(ConfigurationError, match="load_state got assign") as caught:
        accelerator.load_state(folder, assign=True)
    accelerator.load_state(folder)
    return Path(folder, "gradients_0.bin").exists(), str(caught.value)


def test_open_accumulation_windows_are_not_saved(tmp_path: Path) -> None:
    assert run_world(save_in_a_window, 1, str(tmp_path / "state"), timeout=500)[0][0] is False
