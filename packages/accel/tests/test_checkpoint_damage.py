"""Damaged, foreign and malicious files: an error that names the file, and nothing run or changed."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_runs import (
    FILES,
    Counter,
    Evil,
    Noisy,
    Run,
    as_of_another_library,
    same,
)
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel_checkpoint.manifest import MANIFEST_NAME
from accel_checkpoint.safe_load import CheckpointError, read
from accel_checkpoint.writer import write_manifest


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    run = Run(mixed_precision="fp16", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    return run, tmp_path / "state"


@pytest.mark.parametrize("pickled", ["torch", "plain"])
@pytest.mark.parametrize("name", FILES)
def test_no_file_can_run_code(saved: tuple[Run, Path], pickled: str, name: str) -> None:
    run, state = saved
    weights, mark = run.weights(), state.parent / "executed"
    for nested in (
        Evil(mark),
        {"state": Evil(mark)},
        [0, (Evil(mark),)],
        {"state": {0: {"exp_avg": Evil(mark)}}},
        OrderedDict(a=Evil(mark)),
    ):
        if pickled == "torch":
            torch.save(nested, state / name)
        else:
            (state / name).write_bytes(pickle.dumps(nested, protocol=2))
        # The digest would give it away before it is read; whoever can write a pickle can write a manifest too.
        write_manifest(state, 1, {"iteration": 1})
        with pytest.raises(CheckpointError, match=name):
            run.accelerator.load_state(state)
    assert not mark.exists() and same(run.weights(), weights)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("dl_state")])
def test_no_file_of_another_library_can_run_code(saved: tuple[Run, Path], name: str) -> None:
    run, state = saved
    weights, mark = run.weights(), state.parent / "executed"
    as_of_another_library(state)
    torch.save({"state": Evil(mark)}, state / name)
    with pytest.raises(CheckpointError, match=name):
        run.accelerator.load_state(state)
    assert not mark.exists() and same(run.weights(), weights)


def test_the_word_of_the_caller_that_a_file_may_run_code(saved: tuple[Run, Path]) -> None:
    run, state = saved
    mark = state.parent / "executed"
    torch.save({"state": Evil(mark)}, state / "custom_checkpoint_0.pkl")
    write_manifest(state, 1, {"iteration": 1})
    run.accelerator.load_state(state, load_kwargs={"weights_only": False})
    assert mark.exists(), "the word was not taken, or the tests above could not have failed"


def test_what_the_user_has_allowed_is_never_refused_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background reads its files back at any moment of the loop's own loading."""
    own, state, clear = tmp_path / "own.pt", tmp_path / "state.pt", torch.serialization.clear_safe_globals
    torch.save(timedelta(3), own)
    torch.save({"rows": np.arange(3)}, state)

    def clear_while_the_loop_loads() -> None:
        clear()
        assert torch.load(own, weights_only=True) == timedelta(3)

    with torch.serialization.safe_globals([timedelta]):
        monkeypatch.setattr(torch.serialization, "clear_safe_globals", clear_while_the_loop_loads)
        assert read(state)["rows"].tolist() == [0, 1, 2]
        assert torch.load(own, weights_only=True) == timedelta(3)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(state, weights_only=True)


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
    as_of_another_library(state)
    path = state / "random_states_0.pkl"
    good = torch.load(path, weights_only=True)
    for change in (
        {"random_state": (3, (1, 2), None)},
        {"torch_manual_seed": torch.zeros(3)},
        {"numpy_random_seed": 4},
    ):
        torch.save({**good, **change}, path)
        with pytest.raises(CheckpointError, match="random_states_0.pkl"):
            run.accelerator.load_state(state)
    torch.save({"step": 0}, path)
    with pytest.raises(
        CheckpointError, match="random_states_0.pkl.*random_state, numpy_random_seed, torch_manual_seed"
    ):
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
        (state / MANIFEST_NAME).write_text(json.dumps({**content, "files": {name: {"size": 0, "digests": []}}}))
        with pytest.raises(CheckpointError, match=f"outside of the checkpoint: {name}"):
            run.accelerator.load_state(state)
    (state / MANIFEST_NAME).write_text(json.dumps({**content, "world_size": float("inf")}))
    with pytest.raises(CheckpointError, match="world_size is inf"):
        run.accelerator.load_state(state)
    (state / MANIFEST_NAME).write_text(json.dumps({**content, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2"):
        run.accelerator.load_state(state)


def test_another_number_of_objects(saved: tuple[Run, Path]) -> None:
    run, state = saved
    accelerator = run.accelerator
    extra = nn.Linear(1, 1)
    for add, message in (
        (lambda: accelerator.register_for_checkpointing(Counter()), "has 1 registered object and there are 2"),
        (lambda: accelerator.prepare(StepLR(run.optimizer.optimizer, 1)), "has 1 scheduler and there are 2"),
        (lambda: accelerator.prepare(torch.optim.SGD(extra.parameters())), "has 1 optimizer and there are 2"),
        (lambda: accelerator.prepare(extra), "has 1 model and there are 2"),
    ):
        add()
        with pytest.raises(CheckpointError, match=message):
            accelerator.load_state(state)


def test_fewer_objects_than_were_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.train(1, {(0, 3): str(tmp_path / "state")})
    saved = load_file(tmp_path / "state" / "model.safetensors")
    for with_loader in (False, True):
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        model = accelerator.prepare(model)
        loader = accelerator.prepare(DataLoader(Noisy(), batch_size=3)) if with_loader else None
        with pytest.raises(CheckpointError, match=r"Prepare and register the same objects"):
            accelerator.load_state(tmp_path / "state", strict=True)
        caplog.clear()
        accelerator.load_state(tmp_path / "state")
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        assert "was loaded in part" in caplog.text and "1 of 1 optimizer," in caplog.text
        assert "1 of 1 registered object" in caplog.text
        # An evaluation reads all of its data, although the training was interrupted in the middle of an epoch.
        assert loader is None or len(list(loader)) == 8
        accelerator.free_memory()


def test_a_loader_that_was_not_saved_begins_at_its_start(saved: tuple[Run, Path]) -> None:
    run, state = saved
    added = run.accelerator.prepare(DataLoader(Noisy(), batch_size=3))
    run.accelerator.load_state(state)
    assert len(list(added)) == 8
    with pytest.raises(CheckpointError, match="has 1 dataloader and there are 2"):
        run.accelerator.load_state(state, strict=True)


def test_another_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(CheckpointError, match="0.bias, 0.weight"):
        accelerator.load_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", strict=False)
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(3, 1))
    with pytest.raises(CheckpointError, match=r"weight has shape \(1, 2\), but \(1, 3\)"):
        accelerator.load_state(tmp_path / "state")
