"""What is in a checkpoint: several of each kind, the manifest, tied and compiled models, hooks, the functions by
themselves.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_runs import (
    Counter,
    Run,
    as_tensors,
    same,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.checkpointing import (
    get_pretty_name,
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError
from accel_state import context


def several(accelerator: Accelerator) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    models = [nn.Linear(2, 3), nn.Linear(3, 1)]
    optimizers = [
        torch.optim.Adam(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
    ]
    schedulers = [StepLR(optimizer, 2) for optimizer in optimizers]
    loaders = [DataLoader(torch.arange(size), batch_size=1, shuffle=True) for size in (6, 9)]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers, *loaders)
    return [*prepared[:2]], [*prepared[2:4]], [*prepared[4:6]], [*prepared[6:]]


@pytest.mark.parametrize("safe", [True, False])
def test_several_of_each_kind_and_the_names_of_files(tmp_path: Path, safe: bool) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", dataloader_config=config)
    models, optimizers, schedulers, loaders = several(accelerator)
    first, second = Counter(), Counter()
    second.state["count"] = 5
    accelerator.register_for_checkpointing(first, second)
    for _ in zip(*loaders, strict=False):
        loss = models[1](models[0](torch.ones(1, 2))).sum()
        accelerator.backward(loss)
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    accelerator.scaler._scale.fill_(256.0)
    assert accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe) == tmp_path / "state"
    weights = ["model.safetensors", "model_1.safetensors"] if safe else ["pytorch_model.bin", "pytorch_model_1.bin"]
    pairs = [
        f"{stem}{number}.bin"
        for stem in ("optimizer", "scheduler", "sampler", "dl_state_dict")
        for number in ("", "_1")
    ]
    others = ["scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"]
    assert sorted(os.listdir(tmp_path / "state")) == sorted([*weights, *pairs, *others, MANIFEST_NAME])
    assert os.listdir(tmp_path) == ["state"]
    before = [[obj.state_dict() for obj in group] for group in (models, optimizers, schedulers)]
    accelerator.free_memory()
    del accelerator
    with context.isolated():
        torch.manual_seed(7)
        other = Accelerator(cpu=True, mixed_precision="fp16", dataloader_config=config)
        groups = several(other)
        customs = Counter(), Counter()
        other.register_for_checkpointing(*customs)
        other.load_state(tmp_path / "state")
        after = [[obj.state_dict() for obj in group] for group in groups[:3]]
        assert before[2] == after[2] and before[2][0]["last_epoch"] > 0
        assert all(same(a, b) for a, b in zip(before[0], after[0], strict=True))
        for old, new in zip(before[1], after[1], strict=True):
            assert old["param_groups"] == new["param_groups"] and len(new["state"]) == 2
            assert all(same(as_tensors(old["state"][key]), as_tensors(new["state"][key])) for key in old["state"])
        assert other.scaler.get_scale() == 256.0
        assert [custom.state["count"] for custom in customs] == [0, 5] and customs[0].state["rows"].tolist() == [
            0,
            1,
            2,
        ]
        assert customs[1].state["last"] == {1, 2}
        assert [[int(x) for x in loader] for loader in groups[3]] == [[int(x) for x in loader] for loader in loaders]


def test_the_manifest_describes_every_file(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert (
        manifest is not None
        and manifest.world_size == 1
        and manifest.counters == {"iteration": 1, "step": 0, "optimizer_steps": 0}
    )
    assert set(manifest.files) == set(os.listdir(tmp_path / "state")) - {MANIFEST_NAME}
    assert manifest.versions["torch"] == torch.__version__
    sizes = {name: record.size for name, record in manifest.files.items()}
    assert sizes == {name: (tmp_path / "state" / name).stat().st_size for name in sizes}
    digest = xxhash.xxh3_128((tmp_path / "state" / "optimizer.bin").read_bytes()).hexdigest()
    assert manifest.files["optimizer.bin"].digests == (digest,)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_tied_and_compiled_models(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied(), torch.compile(Tied(), backend="eager"))
    accelerator.save_state(tmp_path / "state")
    saved = [accelerator.get_state_dict(model)["second.weight"].clone() for model in accelerator._models]
    accelerator.free_memory()
    tied, compiled = accelerator.prepare(torch.compile(Tied(), backend="eager"), Tied())
    accelerator.load_state(tmp_path / "state")
    for model, weight in zip((accelerator.unwrap_model(tied, keep_torch_compile=False), compiled), saved, strict=True):
        assert torch.equal(model.first.weight, weight) and model.second.weight is model.first.weight


def test_hooks_see_and_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(2, 1), nn.Linear(3, 1))
    calls: list[Any] = []

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert models == [first, second] and torch.equal(weights[1]["weight"], second.weight)
        calls.append("save")
        (Path(output_dir) / "extra").mkdir()
        torch.save(weights.pop(), Path(output_dir) / "extra" / "second.pt")

    def load_hook(models: list[Any], input_dir: str) -> None:
        calls.append("load")
        models.pop().load_state_dict(torch.load(Path(input_dir) / "extra" / "second.pt"))

    handles = accelerator.register_save_state_pre_hook(save_hook), accelerator.register_load_state_pre_hook(load_hook)
    accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None and {"model.safetensors", "extra/second.pt"} <= set(manifest.files)
    assert "model_1.safetensors" not in manifest.files
    kept = [model.weight.detach().clone() for model in (first, second)]
    for model in (first, second):
        nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(first.weight, kept[0]) and torch.equal(second.weight, kept[1]) and calls == ["save", "load"]
    for handle in handles:
        handle.remove()
    with pytest.raises(CheckpointError, match="has 1 model and there are 2"):
        accelerator.load_state(tmp_path / "state")
    accelerator.save_state(tmp_path / "state")
    assert calls == ["save", "load"] and not (tmp_path / "state" / "extra").exists()


def test_the_functions_by_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    path = save_accelerator_state(tmp_path / "new", [model.state_dict()], [optimizer], [], [], 0, 3)
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    kept = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    assert load_accelerator_state(path, [model], [optimizer], [], [], 0) == {"step": 3}
    assert torch.equal(model.weight, kept)
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn
    counter, other = Counter(), Counter()
    counter.state["count"] = 8
    save_custom_state(counter, path, 2)
    load_custom_state(other, path, 2)
    assert other.state["count"] == 8 and (path / "custom_checkpoint_2.pkl").exists()
    assert [get_pretty_name(obj) for obj in (nn.Linear, model, len, "text")] == ["Linear", "Linear", "len", "str"]
