"""Sharded states whose manifest is consistent and whose contents do not fit: nothing of them is loaded, on any rank."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_changes import put, rewrite
from torch import nn

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded.metadata import read_metadata
from accel_checkpoint.writer import write_manifest
from accel_state.testing import run_world

Change = Callable[[Path], None]
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


class Run:
    """A sharded training run, with a registered object."""

    def __init__(self, seed: int, version: int, kind: str) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.full((3, 4), step + 1.0 + self.accelerator.process_index)
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def picture(self) -> list[Any]:
        """What a load changes, as this rank holds it."""
        optimizer = self.optimizer.optimizer
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        tensors = list(self.model.parameters())
        for parameter in tensors.copy():
            tensors += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
        whole = [getattr(tensor, "_local_tensor", tensor).detach().clone().tolist() for tensor in tensors]
        scheduler = self.scheduler.state_dict()
        return [whole, groups, scheduler, self.accelerator.save_iteration, torch.get_rng_state().tolist()]


def table(folder: str, change: Callable[[Any], None]) -> Change:
    """A change of the metadata of a directory of shards."""

    def apply(state: Path) -> None:
        metadata = read_metadata(state / folder)
        change(metadata)
        (state / folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def value(folder: str, name: str, new: Any) -> Change:
    """A change of a value that is not a tensor, whose bytes are kept in the file of a rank."""

    def apply(state: Path) -> None:
        metadata = read_metadata(state / folder)
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        path = state / folder / place.relative_path
        with path.open("ab") as file:
            place.offset = file.tell()
            torch.save(new, file)
            place.length = file.tell() - place.offset
        (state / folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def resized(name: str, size: tuple[int, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        saved = metadata.state_dict_metadata[name]
        metadata.state_dict_metadata[name] = replace(saved, size=torch.Size(size))

    return change


def chunk(name: str, **fields: tuple[int, ...]) -> Callable[[Any], None]:
    """A change of the last part of a tensor."""

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[name].chunks
        chunks[-1] = replace(chunks[-1], **{field: torch.Size(numbers) for field, numbers in fields.items()})

    return change


def without(name: str) -> Callable[[Any], None]:
    return lambda metadata: metadata.state_dict_metadata.pop(name)


MOMENT = "optimizer.state.0.weight.exp_avg"
SHARDED: dict[str, Change] = {
    "weight of another shape": table(MODEL, resized("model.0.weight", (6, 5))),
    "weight with a hole": table(MODEL, chunk("model.0.weight", sizes=(2, 4))),
    "weight whose parts overlap": table(MODEL, chunk("model.0.weight", offsets=(2, 0))),
    "weight outside of itself": table(MODEL, chunk("model.0.weight", offsets=(5, 0))),
    "moment of another shape": table(OPTIMIZER, resized(MOMENT, (6, 5))),
    "moment with a hole": table(OPTIMIZER, chunk(MOMENT, sizes=(1, 4))),
    "moment whose parts overlap": table(OPTIMIZER, chunk(MOMENT, offsets=(1, 0))),
    "optimizer without groups": table(OPTIMIZER, lambda metadata: [
        metadata.state_dict_metadata.pop(name)
        for name in list(metadata.state_dict_metadata) if "param_groups" in name]),
    "optimizer without names": table(OPTIMIZER, without("optimizer.param_groups.0.params")),
    "names are a number": value(OPTIMIZER, "optimizer.param_groups.0.params", 5),
    "names are lists": value(OPTIMIZER, "optimizer.param_groups.0.params", [["0.weight"]]),
    "learning rate": value(OPTIMIZER, "optimizer.param_groups.0.lr", "fast"),
    "learning rate is NaN": value(OPTIMIZER, "optimizer.param_groups.0.lr", float("nan")),
    "nothing of the optimizer": table(OPTIMIZER, lambda metadata: metadata.state_dict_metadata.clear()),
    "paths of nothing": table(OPTIMIZER, lambda metadata: metadata.planner_data.update(dict.fromkeys(
        metadata.planner_data, (1,)))),
    "paths are numbers": table(OPTIMIZER, lambda metadata: metadata.planner_data.update(dict.fromkeys(
        metadata.planner_data, 7))),
    "scheduler": rewrite("scheduler.bin", put("last_epoch", value=10**30)),
}  # fmt: skip
FULL: dict[str, Change] = {
    "weights are a list": rewrite("pytorch_model_fsdp.bin", lambda state: [state]),
    "weight is a number": rewrite("pytorch_model_fsdp.bin", put("0.bias", value=1.5)),
    "weight of another shape": rewrite("pytorch_model_fsdp.bin", put("0.bias", value=torch.zeros(3))),
    "optimizer is a list": rewrite("optimizer.bin", lambda state: [state]),
    "optimizer without groups": rewrite("optimizer.bin", lambda state: {"state": state["state"]}),
    "group is a list": rewrite("optimizer.bin", put("param_groups", 0, value=[1])),
    "state is a list": rewrite("optimizer.bin", put("state", value=[])),
    "entries are a number": rewrite("optimizer.bin", put("state", "0.weight", value=3)),
    "state of an unknown parameter": rewrite("optimizer.bin", put("state", "9.weight", value={})),
    "moment of another shape": rewrite("optimizer.bin", put("state", "0.weight", "exp_avg", value=torch.zeros(3))),
    "moment is a number": rewrite("optimizer.bin", put("state", "2.bias", "exp_avg_sq", value=1.0)),
    "steps below zero": rewrite("optimizer.bin", put("state", "2.bias", "step", value=torch.tensor(-5.0))),
    "steps are NaN": rewrite("optimizer.bin", put("state", "2.bias", "step", value=torch.tensor(float("nan")))),
    "steps of 1e30": rewrite("optimizer.bin", put("state", "2.bias", "step", value=torch.tensor(1e30))),
    "learning rate": rewrite("optimizer.bin", put("param_groups", 0, "lr", value="fast")),
    "learning rate of infinity": rewrite("optimizer.bin", put("param_groups", 0, "lr", value=float("inf"))),
}
LOCAL_MODEL, LOCAL_OPTIMIZER = "pytorch_model_fsdp_rank1.bin", "optimizer_rank1.bin"
LOCAL: dict[str, Change] = {
    "weights are a list": rewrite(LOCAL_MODEL, lambda state: [state]),
    "no weights": rewrite(LOCAL_MODEL, lambda state: {"world_size": 2}),
    "weight is a number": rewrite(LOCAL_MODEL, put("state", "0.bias", value=1)),
    "weight of another shape": rewrite(LOCAL_MODEL, put("state", "0.bias", value=torch.zeros(17))),
    "optimizer is a list": rewrite(LOCAL_OPTIMIZER, put("state", value=[1])),
    "optimizer without state": rewrite(LOCAL_OPTIMIZER, lambda state: {"world_size": 2, "state": {"param_groups": []}}),
    "entries are a number": rewrite(LOCAL_OPTIMIZER, put("state", "state", "0.weight", value=3)),
    "moment of another shape": rewrite(
        LOCAL_OPTIMIZER, put("state", "state", "0.weight", "exp_avg", value=torch.ones(9))
    ),
    "steps below zero": rewrite(LOCAL_OPTIMIZER, put("state", "state", "0.weight", "step", value=torch.tensor(-1.0))),
}
KINDS = {
    (2, "SHARDED_STATE_DICT"): SHARDED,
    (1, "SHARDED_STATE_DICT"): SHARDED,
    (2, "FULL_STATE_DICT"): FULL,
    (1, "LOCAL_STATE_DICT"): LOCAL,
}


def try_all(folder: str, version: int, kind: str) -> list[str]:
    """On every rank: names of the changed states that were loaded, or that changed something."""
    directory, changes = Path(folder), KINDS[version, kind]
    run = Run(0, version, kind)
    run.train(2)
    good = directory / "good"
    run.accelerator.save_state(good)
    run.train(1)
    rank, collectives = run.accelerator.process_index, run.accelerator.process_state.collectives
    if rank == 0:
        manifest = Manifest.read(good)
        assert manifest is not None
        for name, change in changes.items():
            shutil.copytree(good, directory / name)
            change(directory / name)
            (directory / name / MANIFEST_NAME).unlink()
            write_manifest(directory / name, manifest.world_size, manifest.counters)
    run.accelerator.wait_for_everyone()
    before, wrong = run.picture(), []
    for name in changes:
        try:
            run.accelerator.load_state(directory / name)
            wrong.append(f"{name} was loaded")
        except CheckpointError as error:
            own = run.picture()
            if own != before:
                wrong.append(f"{name} changed something on rank {rank}: {error}")
        if any(collectives.all_gather_object(bool(wrong))):
            break
    else:
        run.accelerator.load_state(good)
        assert run.picture() != before, "what fits is loaded"
    return wrong


# Version 1 of FSDP reads its own files with the code that is tested by version 2's, and takes twice as long.
SLOW = [pytest.param(*names, marks=pytest.mark.slow) for names in KINDS if names[0] == 1]


@pytest.mark.parametrize(("version", "kind"), [*(names for names in KINDS if names[0] == 2), *SLOW])
def test_a_sharded_state_that_does_not_fit_changes_nothing(version: int, kind: str, tmp_path: Path) -> None:
    assert run_world(try_all, 2, str(tmp_path), version, kind, timeout=250) == [[], []]
