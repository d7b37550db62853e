"""Checkpoints whose manifest is consistent and whose contents do not fit: nothing of them is loaded."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_changes import DELETE, put, rewrite
from checkpoint_runs import Run, as_of_another_library
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator, DataLoaderConfiguration
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.writer import write_manifest
from accel_state import AccelError
from accel_state.testing import run_world


class Strict:
    """A registered object that loads its own states only."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)
        self.next_key = "value"

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        key, self.next_key = self.next_key, "value"
        self.value.copy_(state[key])


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        content = load_file(directory / "model.safetensors")
        change(content)
        save_file(content, directory / "model.safetensors")

    return apply


def trackers(content: Any) -> Callable[[Path], None]:
    return lambda directory: (directory / "trackers.json").write_text(json.dumps(content)) and None


def own(*path: Any, value: Any) -> Callable[[Path], None]:
    return rewrite("random_states_0.pkl", put(*path, value=value))


def of_loader(**values: Any) -> Callable[[Path], None]:
    """The position of the loader is in the rank's own file, where that has one, and in one for other ranks."""

    def apply(directory: Path) -> None:
        rewrite("dl_state_dict.bin", lambda state: {**state, **values})(directory)
        rewrite("random_states_0.pkl", lambda state: put("dataloaders", 0, value={**state["dataloaders"][0], **values})(
            state))(directory)  # fmt: skip

    return apply


OPTIMIZER, SCHEDULER, SAMPLER = "optimizer.bin", "scheduler.bin", "sampler.bin"
CHANGES: dict[str, Callable[[Path], None]] = {
    "shape of a weight": weights(lambda found: found.update({"3.bias": torch.zeros(2)})),
    "last weight missing": weights(lambda found: found.pop("3.bias") and None),
    "optimizer is a list": rewrite(OPTIMIZER, lambda state: [state]),
    "optimizer without groups": rewrite(OPTIMIZER, put("param_groups", value=DELETE)),
    "group of another size": rewrite(OPTIMIZER, put("param_groups", 0, "params", value=[0, 1])),
    "learning rate": rewrite(OPTIMIZER, put("param_groups", 0, "lr", value="fast")),
    "moment of another shape": rewrite(OPTIMIZER, put("state", 0, "exp_avg", value=torch.zeros(3))),
    "moment is a number": rewrite(OPTIMIZER, put("state", 0, "exp_avg_sq", value=1.0)),
    "state of an unknown parameter": rewrite(OPTIMIZER, put("state", 99, value={"step": torch.tensor(1.0)})),
    "steps below zero": rewrite(OPTIMIZER, put("state", 0, "step", value=torch.tensor(-5.0))),
    "steps are NaN": rewrite(OPTIMIZER, put("state", 0, "step", value=torch.tensor(float("nan")))),
    "scheduler is a list": rewrite(SCHEDULER, lambda state: [1]),
    "scheduler has an epoch of 1e30": rewrite(SCHEDULER, put("last_epoch", value=10**30)),
    "scheduler has other rates": rewrite(SCHEDULER, put("base_lrs", value=[0.1, 0.2])),
    "scheduler of nothing": rewrite(SCHEDULER, lambda state: {"garbage": 1}),
    "sampler's seed": rewrite(SAMPLER, put("initial_seed", value="x")),
    "sampler's epoch": rewrite(SAMPLER, put("epoch", value=-1)),
    "loader's position": of_loader(position=-3),
    "loader's epoch": of_loader(epoch=10**30),
    "loader's processes": of_loader(num_processes=0),
    "loader's randomness": of_loader(begin=[1]),
    "loader's generator": of_loader(order={"generator": torch.zeros(3, dtype=torch.uint8)}),
    "shared loader is a list": rewrite("dl_state_dict.bin", lambda state: [1, 2]),
    "shared loader is empty": rewrite("dl_state_dict.bin", lambda state: {}),
    "shared loader is a text": rewrite("dl_state_dict.bin", lambda state: "x"),
    "shared loader's position": rewrite("dl_state_dict.bin", lambda state: {**state, "position": -3}),
    "loader is a list": rewrite("random_states_0.pkl", put("dataloaders", 0, value=[1, 2])),
    "scaler without a scale": rewrite("scaler.pt", put("scale", value=DELETE)),
    "scaler's scale": rewrite("scaler.pt", put("scale", value=-1.0)),
    "scaler's interval": rewrite("scaler.pt", put("growth_interval", value=0)),
    "registered object": rewrite("custom_checkpoint_1.pkl", lambda state: {"other": 1}),
    "registered object of another shape": rewrite("custom_checkpoint_1.pkl", put("value", value=torch.zeros(3))),
    "python's generator": own("random_state", value=(3, (1, 2), None)),
    "numpy's generator": own("numpy_random_seed", value=("MT19937", [1, 2], 5, 0, 0.0)),
    "torch's generator": own("torch_manual_seed", value=torch.zeros(7, dtype=torch.uint8)),
    "no generator": own("torch_manual_seed", value=DELETE),
    "step below zero": own("step", value=-5),
    "trackers are a list": trackers([1]),
    "trackers' step": trackers({"trackers": {"jsonl": {"run_id": "a", "step": "x"}}}),
}
COUNTERS: list[dict[str, Any]] = [{"iteration": value} for value in (-5, 10**30, 2.5, "3", None, True, [1])]
COUNTERS += [{"optimizer_steps": -1}, {"step": 10**30}, {"world_size": 0}, {"world_size": -1}, {"world_size": 1.5}]


def make_run() -> tuple[Run, Strict]:
    run = Run(mixed_precision="fp16", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    strict = Strict()
    run.accelerator.register_for_checkpointing(strict)
    return run, strict


def picture(run: Run, strict: Strict) -> str:
    """Everything that a load changes."""
    accelerator = run.accelerator
    assert accelerator.scaler is not None
    parts = [
        *(accelerator.unwrap_model(run.model).state_dict(), run.optimizer.optimizer.state_dict()),
        *(run.scheduler.state_dict(), run.loader.state_dict(), accelerator.scaler.state_dict(), strict.state_dict()),
        *(run.counter.state, run.loader.iteration, accelerator.save_iteration, run.optimizer.steps_taken),
        *(random.getstate(), np.random.get_state(), torch.get_rng_state(), accelerator.gradient_state.sync_gradients),
    ]
    with np.printoptions(threshold=10**6):
        torch.set_printoptions(profile="full", precision=10)
        try:
            return repr(parts)
        finally:
            torch.set_printoptions(profile="default")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("structure") / "state"
    run, strict = make_run()
    run.train(1)
    strict.value += 1
    run.accelerator.save_state(state)
    run.accelerator.free_memory()
    return state


def changed_copy(saved: Path, target: Path, change: Callable[[Path], None]) -> None:
    target.mkdir()
    for path in saved.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    manifest = Manifest.read(saved)
    assert manifest is not None
    change(target)
    (target / MANIFEST_NAME).unlink()
    write_manifest(target, manifest.world_size, manifest.counters)


@pytest.mark.parametrize("foreign", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_state_that_does_not_fit_changes_nothing(saved: Path, tmp_path: Path, foreign: bool) -> None:
    run, strict = make_run()
    run.train(2)
    before = picture(run, strict)
    failed = []
    for number, (name, change) in enumerate(CHANGES.items()):
        state = tmp_path / str(number)
        changed_copy(saved, state, change)
        if foreign:
            as_of_another_library(state)
        refused = True
        with suppress(AccelError):
            run.accelerator.load_state(state)
            refused = False
        if refused:
            assert picture(run, strict) == before, name
        else:
            # Other libraries save no positions of ranks, and accel reads neither trackers nor loaders of theirs.
            failed.append(name)
            run, strict = make_run()
            run.train(2)
            before = picture(run, strict)
    assert failed == (["loader is a list"] if foreign else []), "these were loaded"
    changed_copy(saved, tmp_path / "good", lambda directory: None)
    run.accelerator.load_state(tmp_path / "good")
    assert picture(run, strict) != before and torch.equal(strict.value, torch.ones(2))


def test_counters_out_of_bounds_or_missing(saved: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    changed_copy(saved, state, lambda directory: None)
    manifest = Manifest.read(state)
    assert manifest is not None
    for counters in COUNTERS:
        wrong = dict(counters)
        (state / MANIFEST_NAME).unlink()
        write_manifest(state, wrong.pop("world_size", 1), {**manifest.counters, **wrong})
        with pytest.raises(CheckpointError, match=next(iter(counters))):
            Manifest.read(state)
    (state / MANIFEST_NAME).unlink()
    write_manifest(state, 1, {"step": 0})
    with pytest.raises(CheckpointError, match="iteration"):
        Manifest.read(state)


def load_what_fits_one_rank(directory: str) -> None:
    """The own file of rank 1 does not fit: rank 0 loads nothing either."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    strict = Strict()
    accelerator.register_for_checkpointing(strict)
    state = Path(directory) / "state"
    accelerator.save_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    strict.value += 5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if accelerator.process_index == 1:
        strict.next_key = "missing"
    with pytest.raises(CheckpointError, match="rank 1|custom_checkpoint_0"):
        accelerator.load_state(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(strict.value, torch.full((2,), 5.0))


def test_what_one_rank_cannot_load_no_rank_loads(tmp_path: Path) -> None:
    run_world(load_what_fits_one_rank, 2, str(tmp_path))


def test_a_state_without_a_copy_still_loads(tmp_path: Path) -> None:
    """What cannot be undone is loaded all the same."""

    class NotYet(Strict):
        ready = True

        def state_dict(self) -> dict[str, Any]:
            if not self.ready:
                raise RuntimeError("there is none yet")
            return super().state_dict()

    run, obj = Run(), NotYet()
    run.accelerator.register_for_checkpointing(obj)
    obj.value += 3
    run.accelerator.save_state(tmp_path / "state")
    obj.ready, obj.value = False, torch.zeros(2)
    run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(obj.value, torch.full((2,), 3.0)) and os.listdir(tmp_path) == ["state"]
