"""Whole states: what is loaded is what was saved, training goes on bit by bit, and a failed save leaves what was there."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from accel.checkpoint_files import CheckpointError
from accel.checkpoint_folder import CheckpointFolder, newest_complete, rotate
from accel.checkpointing import (
    get_pretty_name,
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accel.manifest import MANIFEST_NAME, Manifest, write_manifest
from accel_state import ConfigurationError, context
from accel_state.random import set_seed
from accel_state.testing import run_world


class Noisy(Dataset):
    """Samples with noise from each of the process's generators, as augmentation has it.

    In worker processes there is none: their generators are not part of a state.
    """

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            return torch.tensor(index), torch.full((4,), float(index) / 23)
        noise = random.random() + float(np.random.random()) + float(torch.rand(()))
        return torch.tensor(index), torch.full((4,), float(index) / 23) + 0.01 * noise


class Stream(IterableDataset):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return (Noisy()[index] for index in range(len(Noisy())))


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "mean": np.float64(0.5), "last": {1, 2}, "rows": np.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


class Run:
    """Everything that a script prepares."""

    def __init__(self, seed: int = 0, workers: int = 0, stream: bool = False, **settings: Any) -> None:
        set_seed(seed, device_specific=True)
        self.accelerator = Accelerator(cpu=True, **settings)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        scheduler: LRScheduler = StepLR(optimizer, 3, gamma=0.5)
        how = "fork" if workers else None  # this module cannot be imported by name, as other ways need it
        data = Stream() if stream else Noisy()
        loader = DataLoader(data, batch_size=3, shuffle=not stream, num_workers=workers, multiprocessing_context=how)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(self.model, optimizer, scheduler, loader)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.record: list[Any] = []

    def train(self, epochs: int, save: dict[tuple[int, int], str] | None = None, done: int = 0) -> list[Any]:
        """Train, and return what every step did; save states after the steps named by epoch and batch."""
        for epoch in range(done, epochs):
            for index, (ids, x) in enumerate(self.loader):
                loss = (self.model(x).squeeze(-1) - ids / 23).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.counter.state["count"] += 1
                drawn = random.random(), float(np.random.random()), float(torch.rand(()))
                self.record.append((ids.tolist(), loss.item(), drawn, self.scheduler.get_last_lr(), self.counter.state["count"]))
                if save and (epoch, index) in save:
                    self.accelerator.save_state(save[epoch, index])
        return self.record

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}


def in_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Accelerator settings from what can be sent to a rank."""
    loaders = DataLoaderConfiguration(**settings.get("loaders", {}))
    chosen = {name: settings[name] for name in ("workers", "stream") if name in settings}
    return {**chosen, "mixed_precision": settings.get("mixed_precision", "no"), "dataloader_config": loaders}


def uninterrupted(settings: dict[str, Any], save: dict[tuple[int, int], str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    run = Run(**in_one_process(settings))
    return run.train(3, save), run.weights()


def resumed(settings: dict[str, Any], folders: dict[tuple[int, int], str]) -> list[tuple[list[Any], dict[str, torch.Tensor]]]:
    results = []
    for (epoch, _), folder in folders.items():
        run = Run(seed=99, **in_one_process(settings))
        run.accelerator.load_state(folder)
        results.append((run.train(3, done=epoch), run.weights()))
    return results


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- exact resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {}),
        (1, {"workers": 1}),
        (2, {"mixed_precision": "fp16", "loaders": {"use_seedable_sampler": True}}),
        (2, {"loaders": {"dispatch_batches": True}}),
        (2, {"loaders": {"dispatch_batches": False}, "stream": True}),
    ],
    ids=["1", "2", "workers", "fp16-seedable", "dispatch", "stream"],
)
def test_training_goes_on_bit_by_bit_in_a_new_process(tmp_path: Path, world: int, settings: dict[str, Any]) -> None:
    points = {(0, 1): "first", (1, 2): "middle", (1, 7 // world): "end"}
    save = {point: str(tmp_path / name) for point, name in points.items()}
    whole = run_world(uninterrupted, world, settings, save)
    batches = len(whole[0][0]) // 3
    assert whole[0][0] != whole[-1][0] or world == 1
    for rank, rests in enumerate(run_world(resumed, world, settings, save)):
        for (epoch, batch), (rest, weights) in zip(save, rests, strict=True):
            assert rest == whole[rank][0][epoch * batches + batch + 1 :], (epoch, batch, rank)
            assert same(weights, whole[rank][1]), (epoch, batch, rank)


def test_without_a_checkpoint_another_seed_trains_otherwise(tmp_path: Path) -> None:
    """The comparison above could fail."""
    first, second = Run(seed=0).train(1), Run(seed=99).train(1)
    assert [step[0] for step in first] != [step[0] for step in second] and first[0][1] != second[0][1]


def test_going_back_in_the_same_process(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    run.accelerator.save_state(tmp_path / "state")
    first = run.train(3, done=1)[8:]
    weights = run.weights()
    run.record = []
    run.accelerator.load_state(tmp_path / "state")
    assert run.train(3, done=1) == first and len(first) == 16
    assert same(run.weights(), weights)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    plain = Run().train(2)
    assert Run().train(2, {(0, 0): str(tmp_path / "a"), (1, 3): str(tmp_path / "b")}) == plain


# -- what is in it -----------------------------------------------------------------------------------------------------


def several(accelerator: Accelerator) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    models = [nn.Linear(2, 3), nn.Linear(3, 1)]
    optimizers = [torch.optim.Adam(models[0].parameters(), lr=0.1), torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)]
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
    pairs = [f"{stem}{number}.bin" for stem in ("optimizer", "scheduler", "sampler", "dl_state_dict") for number in ("", "_1")]
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
        assert [custom.state["count"] for custom in customs] == [0, 5] and customs[0].state["rows"].tolist() == [0, 1, 2]
        assert customs[1].state["last"] == {1, 2}
        assert [[int(x) for x in loader] for loader in groups[3]] == [[int(x) for x in loader] for loader in loaders]


def as_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items() if value is not None}


def test_the_manifest_describes_every_file(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None and manifest.world_size == 1 and manifest.counters == {"iteration": 1, "step": 0}
    assert set(manifest.files) == set(os.listdir(tmp_path / "state")) - {MANIFEST_NAME}
    assert manifest.versions["torch"] == torch.__version__
    sizes = {name: record.size for name, record in manifest.files.items()}
    assert sizes == {name: (tmp_path / "state" / name).stat().st_size for name in sizes}
    digest = subprocess.run(["sha256sum", tmp_path / "state" / "optimizer.bin"], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    assert manifest.files["optimizer.bin"].sha256 == digest


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
    with pytest.raises(CheckpointError, match="has 1 models and there are 2"):
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


# -- naming and rotation -----------------------------------------------------------------------------------------------


def project(folder: Path, **settings: Any) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **settings)


def checkpoints(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_numbers_limit_and_the_newest(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path, total_limit=2))
    for number in range(12):
        run.counter.state["count"] = number
        assert run.accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    assert checkpoints(tmp_path) == ["checkpoint_10", "checkpoint_11"]
    del run
    with context.isolated():
        other = Run(project_config=project(tmp_path, total_limit=2))
        other.accelerator.load_state()
        assert other.counter.state["count"] == 11 and other.accelerator.save_iteration == 12
        other.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_10")
        assert other.counter.state["count"] == 10 and other.accelerator.save_iteration == 11
        with pytest.raises(ConfigurationError, match="checkpoint_11 exists already.*iteration"):
            other.accelerator.save_state()
        assert checkpoints(tmp_path) == ["checkpoint_10", "checkpoint_11"]
        other.accelerator.project_configuration.iteration = 3
        other.accelerator.save_state()
        assert checkpoints(tmp_path) == ["checkpoint_11", "checkpoint_3"], "the one just saved is the newest, whatever its number"


def test_a_limit_of_zero_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path, total_limit=0))
    run.accelerator.save_state()
    run.accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_1"]


def test_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path))
    for number in range(4):
        run.counter.state["count"] = number
        run.accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3" / "optimizer.bin").unlink()
    (folder / "checkpoint_2" / MANIFEST_NAME).write_text("{")
    (folder / "checkpoint_9").mkdir()
    run.accelerator.load_state()
    assert run.counter.state["count"] == 1 and newest_complete(folder).name == "checkpoint_1"
    for number in (0, 1):
        shutil.rmtree(folder / f"checkpoint_{number}")
    with pytest.raises(ConfigurationError, match="only incomplete ones .checkpoint_2, checkpoint_3, checkpoint_9"):
        run.accelerator.load_state()


def test_an_interrupted_rotation_is_finished_by_the_next(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"checkpoint_{number}").mkdir()
    (tmp_path / ".checkpoint_0.deleted").mkdir()
    assert rotate(tmp_path, 1, tmp_path / "checkpoint_2") == [tmp_path / "checkpoint_1"]
    assert os.listdir(tmp_path) == ["checkpoint_2"]


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: accelerator.save_state(), "needs output_dir"),
        (lambda: accelerator.load_state(), "needs input_dir"),
        (lambda: accelerator.save_state(tmp_path / "file"), "is a file"),
        (lambda: accelerator.save_state("."), "working directory"),
        (lambda: accelerator.load_state(tmp_path / "none"), "none is no folder"),
        (lambda: accelerator.save_state(tmp_path / "state", shards=3), "shards, which SingleStrategy"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            call()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(ConfigurationError, match="project_dir="):
        accelerator.save_state()
    accelerator.project_configuration.project_dir = str(tmp_path)
    with pytest.raises(ConfigurationError, match="contradicts automatic"):
        accelerator.save_state(tmp_path / "state")
    with pytest.raises(ConfigurationError, match="no checkpoint_<number>"):
        accelerator.load_state()
    assert sorted(os.listdir(tmp_path)) == ["file"]


# -- replacing, failing ------------------------------------------------------------------------------------------------


def test_an_older_checkpoint_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    run = Run()
    state = tmp_path / "state"
    run.accelerator.save_state(state, safe_serialization=False)
    (state / "notes.txt").write_text("mine")
    (state / "logs").mkdir()
    run.accelerator.save_state(state)
    names = set(os.listdir(state))
    assert {"notes.txt", "logs", "model.safetensors"} <= names and "pytorch_model.bin" not in names
    manifest = Manifest.read(state)
    assert manifest is not None and "notes.txt" not in manifest.files and os.listdir(tmp_path) == ["state"]
    link = tmp_path / "link"
    link.symlink_to(state)
    run.counter.state["count"] = 4
    run.accelerator.save_state(link)
    assert link.is_symlink() and (state / "notes.txt").read_text() == "mine"
    run.counter.state["count"] = 0
    run.accelerator.load_state(state)
    assert run.counter.state["count"] == 4


@pytest.mark.parametrize("killed", ["between the renames", "before clearing up", "while writing"])
def test_an_interrupted_replacement_is_recovered(tmp_path: Path, killed: str) -> None:
    run = Run()
    run.counter.state["count"] = 1
    run.accelerator.save_state(tmp_path / "state")
    folder = CheckpointFolder(tmp_path / "state")
    (folder.target / "notes.txt").write_text("mine")
    folder.begin()
    if killed == "between the renames":
        os.rename(folder.target, folder.replaced)
    elif killed == "before clearing up":
        shutil.copytree(folder.target, folder.replaced)
        (folder.target / "notes.txt").unlink()
    run.counter.state["count"] = 2
    run.accelerator.load_state(tmp_path / "state")
    assert run.counter.state["count"] == 1 and (tmp_path / "state" / "notes.txt").read_text() == "mine"
    run.accelerator.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]


class Failing(Counter):
    """Fails to give its state, from some time on."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("no state today")
        return self.state


def failing_save(folder: str, failing_rank: int) -> tuple[str, list[str], int]:
    run = Run(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1))
    failing = Failing()
    run.accelerator.register_for_checkpointing(failing)
    run.accelerator.save_state()
    failing.fails = run.accelerator.process_index == failing_rank
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.save_state()
    run.accelerator.wait_for_everyone()
    left = checkpoints(Path(folder))
    run.accelerator.wait_for_everyone()
    failing.fails = False
    run.accelerator.save_state()
    run.accelerator.load_state()
    return str(caught.value), left, run.accelerator.save_iteration


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_is_known_to_all_and_leaves_no_trace(tmp_path: Path, rank: int) -> None:
    for message, left, iteration in run_world(failing_save, 2, str(tmp_path), rank):
        assert f"failed on 1 of 2 ranks. rank {rank}: KeyError: 'no state today'" in message
        assert left == ["checkpoint_0"] and iteration == 2
    assert checkpoints(tmp_path) == ["checkpoint_1"]


def test_an_interrupted_save_leaves_no_trace(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run.accelerator.register_save_state_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.accelerator.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    run.accelerator.load_state(tmp_path / "state")


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    run = Run()
    for value, kind in ((Path("x"), "pathlib"), (deque([1]), "collections.deque")):
        run.counter.state["more"] = value
        with pytest.raises(CheckpointError, match=rf"registered object 0 \(Counter\).*{kind}.*add_safe_globals"):
            run.accelerator.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == []


def test_weights_without_values_are_not_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, device_placement=False)
    accelerator.prepare(nn.Linear(2, 1, device="meta"))
    with pytest.raises(ConfigurationError, match="meta device"):
        accelerator.save_state(tmp_path / "state")


@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk(tmp_path: Path, safe: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        run = Run()
        run.accelerator.save_state(disk / "state", safe_serialization=safe)
        before = {path.name: path.read_bytes() for path in (disk / "state").iterdir()}
        run.accelerator.prepare(nn.Linear(500, 500))
        with pytest.raises(CheckpointError, match=r"could not be written to .*state, with 0\.\d MiB free"):
            run.accelerator.save_state(disk / "state", safe_serialization=safe)
        assert os.listdir(disk) == ["state"]
        assert {path.name: path.read_bytes() for path in (disk / "state").iterdir()} == before
    finally:
        # What torch had open when writing failed is held by the traceback.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    run = Run(mixed_precision="fp16", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    return run, tmp_path / "state"


FILES = (
    *("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl"),
    *("custom_checkpoint_0.pkl", "dl_state_dict.bin"),
)


@pytest.mark.parametrize("pickled", ["torch", "plain"])
def test_no_file_can_run_code(saved: tuple[Run, Path], pickled: str) -> None:
    run, state = saved
    weights = run.weights()
    mark = state.parent / "executed"
    for name in FILES:
        kept = (state / name).read_bytes()
        if pickled == "torch":
            torch.save({"state": Evil(mark)}, state / name)
        else:
            (state / name).write_bytes(pickle.dumps({"state": Evil(mark)}, protocol=2))
        # The digest would give it away before it is read; whoever can write a pickle can write a manifest too.
        manifest = Manifest.read(state)
        assert manifest is not None
        write_manifest(state, 2 if name.startswith("dl_state") else 1, manifest.counters)
        with pytest.raises(CheckpointError, match=name):
            run.accelerator.load_state(state)
        (state / MANIFEST_NAME).unlink()
        if not name.startswith("dl_state"):
            with pytest.raises(CheckpointError, match=name):
                run.accelerator.load_state(state)
        (state / name).write_bytes(kept)
        write_manifest(state, 1, manifest.counters)
    assert not mark.exists() and same(run.weights(), weights)
    run.accelerator.load_state(state)
    torch.save({"state": Evil(mark)}, state / "custom_checkpoint_0.pkl")
    write_manifest(state, 1, manifest.counters)
    run.accelerator.load_state(state, load_kwargs={"weights_only": False})
    assert mark.exists(), "the caller's word that a file may run code was not taken, or the test could not have failed"


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME])
def test_damage_is_found_and_named(saved: tuple[Run, Path], name: str) -> None:
    run, state = saved
    whole = (state / name).read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :], b""):
        (state / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            run.accelerator.load_state(state)
    (state / name).write_bytes(whole)
    run.accelerator.load_state(state)


def test_damaged_generators_without_a_manifest(saved: tuple[Run, Path]) -> None:
    run, state = saved
    (state / MANIFEST_NAME).unlink()
    path = state / "random_states_0.pkl"
    good = torch.load(path, weights_only=True)
    for change in ({"random_state": (3, (1, 2), None)}, {"torch_manual_seed": torch.zeros(3)}, {"numpy_random_seed": 4}):
        torch.save({**good, **change}, path)
        with pytest.raises(CheckpointError, match="random_states_0.pkl"):
            run.accelerator.load_state(state)
    torch.save({"step": 0}, path)
    with pytest.raises(CheckpointError, match=r"random_states_0.pkl.*random_state, numpy_random_seed, torch_manual_seed missing"):
        run.accelerator.load_state(state)
    path.unlink()
    with pytest.raises(CheckpointError, match="has no random_states_0.pkl"):
        run.accelerator.load_state(state)


def test_missing_files_are_listed(saved: tuple[Run, Path]) -> None:
    run, state = saved
    for name in ("optimizer.bin", "scaler.pt"):
        (state / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no optimizer\.bin, scaler\.pt"):
        run.accelerator.load_state(state)


def test_a_manifest_cannot_point_outside(saved: tuple[Run, Path]) -> None:
    run, state = saved
    content = json.loads((state / MANIFEST_NAME).read_text())
    for name in ("../secret", "/etc/passwd"):
        (state / MANIFEST_NAME).write_text(json.dumps({**content, "files": {name: {"size": 0, "sha256": ""}}}))
        with pytest.raises(CheckpointError, match=f"outside of the checkpoint: {name}"):
            run.accelerator.load_state(state)
    (state / MANIFEST_NAME).write_text(json.dumps({**content, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2"):
        run.accelerator.load_state(state)


def test_another_number_of_objects(saved: tuple[Run, Path]) -> None:
    run, state = saved
    accelerator = run.accelerator
    extra = nn.Linear(1, 1)
    for add, message in (
        (lambda: accelerator.register_for_checkpointing(Counter()), "has 1 registered objects and there are 2"),
        (lambda: accelerator.prepare(DataLoader(Noisy())), "has 1 dataloaders and there are 2"),
        (lambda: accelerator.prepare(StepLR(run.optimizer.optimizer, 1)), "has 1 schedulers and there are 2"),
        (lambda: accelerator.prepare(torch.optim.SGD(extra.parameters())), "has 1 optimizers and there are 2"),
        (lambda: accelerator.prepare(extra), "has 1 models and there are 2"),
    ):
        add()
        with pytest.raises(CheckpointError, match=message):
            accelerator.load_state(state)


def test_another_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(CheckpointError, match="lacks 0.bias, 0.weight and has bias, weight that the model lacks"):
        accelerator.load_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", strict=False)
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match="size mismatch for weight"):
        accelerator.load_state(tmp_path / "state")


# -- several ranks -----------------------------------------------------------------------------------------------------


def save_on_ranks(folder: str) -> tuple[list[str], float]:
    run = Run()
    run.train(1)
    # Each rank makes up a name of its own; the first one's counts.
    path = run.accelerator.save_state(f"{folder}/{run.accelerator.process_index}")
    return sorted(os.listdir(path)), random.random()


def load_on_ranks(folder: str) -> float | str:
    run = Run(seed=5)
    try:
        run.accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return random.random()


def test_every_rank_has_its_own_generators(tmp_path: Path) -> None:
    results = run_world(save_on_ranks, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["0"] and results[0][0] == results[1][0]
    assert [name for name in results[0][0] if name.startswith("random")] == ["random_states_0.pkl", "random_states_1.pkl"]
    assert run_world(load_on_ranks, 2, str(tmp_path / "0")) == [drawn for _, drawn in results]
    assert results[0][1] != results[1][1]
    assert run_world(load_on_ranks, 1, str(tmp_path / "0")) == [results[0][1]]
    messages = run_world(load_on_ranks, 3, str(tmp_path / "0"))
    assert all("no random_states_2.pkl: it was saved on 2 processes, and this is rank 2 of 3" in message for message in messages)
    (tmp_path / "0" / "random_states_1.pkl").unlink()
    messages = run_world(load_on_ranks, 2, str(tmp_path / "0"))
    assert all("has no random_states_1.pkl" in message for message in messages), "a rank was left alone with its error"
