"""Symbolic links in directories that are written, replaced, rotated or read: their targets stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Run, as_of_another_library, checkpoints, project, same
from torch import nn

from accel import Accelerator
from accel.fsdp.merge import merge_fsdp_weights
from accel.utils import load_fsdp_model, save_fsdp_model
from accel_checkpoint.atomic_dir import DELETED, PARTIAL, REPLACED, aside, recover, recover_all, remove_leftovers
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded.metadata import read_metadata
from accel_checkpoint.sharded.writer import TensorWriter
from accel_state.paths import LinkError
from accel_state.testing import run_world


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere" / "precious"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("mine")
    (folder / "model.safetensors").write_text("mine")
    return folder


def intact(precious: Path) -> bool:
    names = sorted(str(path.relative_to(precious)) for path in precious.rglob("*"))
    return (
        names == ["deep", "deep/file", "model.safetensors"] and (precious / "model.safetensors").read_text() == "mine"
    )


@pytest.mark.parametrize("kind", [PARTIAL, REPLACED, DELETED])
@pytest.mark.parametrize("exists", [True, False])
def test_a_save_refuses_a_link_at_its_hidden_names(tmp_path: Path, precious: Path, kind: str, exists: bool) -> None:
    run, state = Run(), tmp_path / "runs" / "state"
    run.accelerator.save_state(state)
    before = (state / MANIFEST_NAME).read_bytes()
    link = aside(state, kind)
    link.symlink_to(precious if exists else tmp_path / "missing")
    with pytest.raises(LinkError, match=link.name):
        run.accelerator.save_state(state)
    assert intact(precious) and link.is_symlink() and not (tmp_path / "missing").exists()
    assert (state / MANIFEST_NAME).read_bytes() == before
    link.unlink()
    run.accelerator.save_state(state)
    assert (state / MANIFEST_NAME).read_bytes() != before and os.listdir(state.parent) == ["state"]


def test_a_load_refuses_a_link_at_a_hidden_name(tmp_path: Path, precious: Path) -> None:
    run, state = Run(), tmp_path / "runs" / "state"
    run.accelerator.save_state(state)
    aside(state, REPLACED).symlink_to(precious)
    for directory in (state, tmp_path / "runs" / "gone"):
        aside(directory, REPLACED).unlink(missing_ok=True)
        aside(directory, REPLACED).symlink_to(precious)
        with pytest.raises(LinkError, match=aside(directory, REPLACED).name):
            run.accelerator.load_state(directory)
    with pytest.raises(LinkError):
        recover(state)
    assert intact(precious)


def test_links_of_neighbours_are_left_alone(tmp_path: Path, precious: Path) -> None:
    run, parent = Run(), tmp_path / "runs"
    parent.mkdir()
    for kind in (PARTIAL, REPLACED, DELETED):
        aside(parent / "other", kind).symlink_to(precious)
    before = sorted(os.listdir(parent))
    run.accelerator.save_state(parent / "state")
    recover_all(parent)
    remove_leftovers(parent)
    assert sorted(os.listdir(parent)) == sorted([*before, "state"]) and intact(precious)


def test_rotation_neither_follows_nor_counts_links(tmp_path: Path, precious: Path) -> None:
    run = Run(project_config=project(tmp_path, total_limit=1))
    run.accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_7").symlink_to(precious)
    run.accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_1", "checkpoint_7"] and intact(precious)
    aside(folder / "checkpoint_1", DELETED).symlink_to(precious)
    with pytest.raises(LinkError, match="checkpoint_1"):
        run.accelerator.save_state()
    assert intact(precious)


def test_a_hook_that_links_a_file_into_a_checkpoint_is_told_so(tmp_path: Path, precious: Path) -> None:
    run = Run()
    source = precious / "model.safetensors"
    handle = run.accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: Path(directory, "base.safetensors").symlink_to(source)
    )
    with pytest.raises(LinkError, match=r"base\.safetensors"):
        run.accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists() and intact(precious)
    handle.remove()
    run.accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: Path(directory, "model.safetensors").symlink_to(source)
    )
    with pytest.raises(LinkError, match=r"model\.safetensors"):
        run.accelerator.save_state(tmp_path / "state")
    assert intact(precious)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", MANIFEST_NAME, "random_states_0.pkl"])
def test_a_link_that_leads_out_of_a_checkpoint_is_not_read(tmp_path: Path, name: str) -> None:
    run, state = Run(), tmp_path / "state"
    run.train(1)
    run.accelerator.save_state(state)
    run.train(2, done=1)
    weights = run.weights()
    shutil.move(state / name, tmp_path / "kept")
    (state / name).symlink_to(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=name):
        run.accelerator.load_state(state)
    assert same(run.weights(), weights)
    # The same contents behind a link within the checkpoint are read.
    if name != MANIFEST_NAME:
        (state / name).unlink()
        shutil.move(tmp_path / "kept", state / "kept")
        (state / name).symlink_to("kept")
        run.accelerator.load_state(state)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "sampler.bin"])
def test_a_link_that_leads_out_of_a_foreign_checkpoint_is_not_read(tmp_path: Path, name: str) -> None:
    run, state = Run(), tmp_path / "state"
    run.train(1)
    run.accelerator.save_state(state)
    as_of_another_library(state)
    run.accelerator.load_state(state)
    (state / "notes").symlink_to(tmp_path)  # not a file of a checkpoint, so not in the way
    run.accelerator.load_state(state)
    run.train(2, done=1)
    weights = run.weights()
    if not (state / name).exists():
        (state / name).touch()
    shutil.move(state / name, tmp_path / "kept")
    (state / name).symlink_to(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=name):
        run.accelerator.load_state(state)
    assert same(run.weights(), weights)


def test_shards_behind_links(tmp_path: Path, precious: Path) -> None:
    shards = tmp_path / "pytorch_model_fsdp_0"
    shards.mkdir()
    writer = TensorWriter(shards, 1 << 20)
    writer.add(["model.weight"], torch.ones(2, 2), [2, 2], [0, 0])
    name = writer.finish()[0]
    read_metadata(shards)
    (tmp_path / "link").symlink_to(shards)
    with pytest.raises(LinkError, match="link"):
        merge_fsdp_weights(tmp_path / "link", tmp_path / "merged", remove_checkpoint_dir=True)
    assert (shards / name).is_file() and not (tmp_path / "merged").exists()
    for linked in (name, ".metadata"):
        shutil.move(shards / linked, tmp_path / "kept")
        (shards / linked).symlink_to(tmp_path / "kept")
        with pytest.raises(CheckpointError, match=linked):
            read_metadata(shards)
        (shards / linked).unlink()
        shutil.move(tmp_path / "kept", shards / linked)
    shutil.move(shards / name, tmp_path / "kept")
    (shards / name).symlink_to(tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    with pytest.raises(LinkError, match=name):
        TensorWriter(shards, 1 << 20).add(["model.weight"], torch.ones(2, 2), [2, 2], [0, 0])
    assert (tmp_path / "kept").read_bytes() == before


def save_sharded_by_hand(directory: str) -> None:
    from accel import FullyShardedDataParallelPlugin

    folder, precious = Path(directory) / "weights", Path(directory) / "elsewhere" / "precious"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    rank = accelerator.process_index
    stale = folder / ".partial" / "pytorch_model_fsdp_1"
    if rank == 0:  # of a save that was killed: it must not replace a complete one
        stale.mkdir(parents=True)
        (stale / "rest").touch()
    accelerator.wait_for_everyone()
    save_fsdp_model(plugin, accelerator, model, folder)
    assert os.listdir(folder) == ["pytorch_model_fsdp_0"]
    accelerator.wait_for_everyone()
    for name in (".partial", "pytorch_model_fsdp_0"):
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).symlink_to(precious)
        accelerator.wait_for_everyone()
        with pytest.raises(LinkError, match=name):
            save_fsdp_model(plugin, accelerator, model, folder)
        accelerator.wait_for_everyone()
        assert intact(precious)
        if name == "pytorch_model_fsdp_0":
            with pytest.raises(CheckpointError, match=name):
                load_fsdp_model(plugin, accelerator, model, folder)
        accelerator.wait_for_everyone()
        if rank == 0:
            (folder / name).unlink()
        accelerator.wait_for_everyone()
        save_fsdp_model(plugin, accelerator, model, folder)


def test_a_sharded_model_is_not_written_through_links(tmp_path: Path, precious: Path) -> None:
    run_world(save_sharded_by_hand, 2, str(tmp_path))


def test_a_manifest_lists_no_links(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None and not any((tmp_path / "state" / name).is_symlink() for name in manifest.files)
