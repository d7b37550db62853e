"""Replacing an older checkpoint, and saves that fail: what was there stays, and every rank knows."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Failing,
    Run,
    checkpoints,
)
from safetensors import SafetensorError
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_checkpoint.atomic_dir import CheckpointDirectory
from accel_checkpoint.manifest import Manifest
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.safe_load import read_safetensors
from accel_state import ConfigurationError
from accel_state.testing import run_world


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
    folder = CheckpointDirectory(tmp_path / "state")
    (folder.target / "notes.txt").write_text("mine")
    folder.begin()
    folder.release()  # as when a process ends
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


def test_a_save_first_finishes_an_interrupted_replacement(tmp_path: Path) -> None:
    """Without a load before it: the older checkpoint is back even if this save fails."""
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    folder = CheckpointDirectory(tmp_path / "state")
    (folder.target / "notes.txt").write_text("mine")
    os.rename(folder.target, folder.replaced)
    folder.begin()
    assert (folder.target / "notes.txt").read_text() == "mine" and not folder.replaced.exists()
    folder.abandon()
    run.accelerator.load_state(folder.target)
    os.rename(folder.target, folder.replaced)
    run.accelerator.save_state(folder.target)
    assert (folder.target / "notes.txt").read_text() == "mine" and os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("error", [errno.ENOTSUP, errno.ENOLCK, errno.EINVAL])
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """States are saved, replaced and rotated; what might be another process's unfinished save stays."""
    refused: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        refused.append(operation)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    unfinished = tmp_path / ".other.accel-partial"
    unfinished.mkdir()
    run = Run(project_config=ProjectConfiguration(str(tmp_path / "p"), automatic_checkpoint_naming=True, total_limit=1))
    for count in (1, 2):
        run.counter.state["count"] = count
        run.accelerator.save_state()
    assert checkpoints(tmp_path / "p") == ["checkpoint_1"] and refused
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    directory.commit()
    directory.begin()
    directory.abandon()
    assert sorted(os.listdir(tmp_path)) == [unfinished.name, "p", "state"]
    run.accelerator.load_state()
    assert run.counter.state["count"] == 2


def test_errors_of_writers_name_the_directory(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    for error in (SafetensorError("I/O error"), OSError(28, "full"), RuntimeError("PytorchStreamWriter failed")):
        with pytest.raises(CheckpointError, match=str(tmp_path / "state")), directory.explaining_write_errors():
            raise error
    with pytest.raises(RuntimeError, match="^of a model$"), directory.explaining_write_errors():
        raise RuntimeError("of a model")
    (tmp_path / "m.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        read_safetensors(tmp_path / "m.safetensors", "cpu")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_another_run_takes_over_is_no_full_disk(tmp_path: Path, replaced: bool) -> None:
    """As on a file system without locks."""
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    (directory.partial / "model.safetensors").touch()
    shutil.rmtree(directory.partial)
    if replaced:
        directory.partial.mkdir()
    message = "deleted or replaced.*its own directory"
    with pytest.raises(CheckpointError, match=message) as raised, directory.explaining_write_errors():
        (directory.partial / "model.safetensors").rename(directory.partial / "renamed")
    assert "free" not in str(raised.value)


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
    run, noted = Run(), torch.ones(1)
    noted.note = Path("x")  # saved with the tensor
    itself: list[Any] = [Path("x")]
    itself.append(itself)
    paths = [Path("x"), [Path("x")], (1, {Path("x"): 1}), {"a": noted}, OrderedDict(a=Path("x")), itself]
    for value, kind in (*((path, "pathlib") for path in paths), (deque([1]), "collections.deque")):
        run.counter.state["more"] = value
        with pytest.raises(CheckpointError, match=rf"registered object 0 \(Counter\).*{kind}.*add_safe_globals"):
            run.accelerator.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == []


def test_weights_without_values_are_not_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, device_placement=False)
    accelerator.prepare(nn.Linear(2, 1, device="meta"))
    with pytest.raises(ConfigurationError, match="meta device"):
        accelerator.save_state(tmp_path / "state")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    # What torch had open when writing failed is held by the traceback.
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk(disk: Path, safe: bool, blocking: bool) -> None:
    run = Run()
    run.accelerator.save_state(disk / "state", safe_serialization=safe)
    before = {path.name: path.read_bytes() for path in (disk / "state").iterdir()}
    big = nn.Linear(500, 500)
    run.accelerator.prepare(big)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"state.*0\.\d MiB free.*No"):
            run.accelerator.save_state(disk / "state", safe_serialization=safe, blocking=blocking)
            run.accelerator.wait_for_save()
        assert os.listdir(disk) == ["state"]
        assert {path.name: path.read_bytes() for path in (disk / "state").iterdir()} == before
    run.accelerator.prepared.models.pop()
    run.accelerator.save_state(disk / "state", safe_serialization=safe, blocking=blocking)
    run.accelerator.load_state(disk / "state")


def test_a_mount_point_cannot_be_replaced(disk: Path) -> None:
    run = Run()
    with pytest.raises(ConfigurationError, match="is a mount point"):
        run.accelerator.save_state(disk)
    assert os.listdir(disk) == [] and os.listdir(disk.parent) == ["disk"]
    run.accelerator.save_state(disk / "state")


def test_a_place_that_another_run_writes_to(tmp_path: Path) -> None:
    run, other = Run(), CheckpointDirectory(tmp_path / "state")
    other.begin()
    (other.partial / "theirs").touch()
    with pytest.raises(CheckpointError, match="another save to .* is in progress"):
        run.accelerator.save_state(tmp_path / "state")
    run.accelerator.save_state(tmp_path / "beside")
    assert (other.partial / "theirs").exists(), "what another run was writing has been cleared away"
    other.abandon()
    run.accelerator.save_state(tmp_path / "state")
    assert sorted(os.listdir(tmp_path)) == ["beside", "state"]


def test_what_killed_runs_have_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (".old.accel-partial", ".older.accel-deleted", ".mine.partial", ".accel-partial"):
        (tmp_path / name / "inside").mkdir(parents=True)
    os.rename(Run().accelerator.save_state(tmp_path / "kept"), tmp_path / ".kept.accel-replaced")
    Run().accelerator.save_state(tmp_path / "state")
    assert sorted(os.listdir(tmp_path)) == [".accel-partial", ".mine.partial", "kept", "state"]


def hold_after_fork(folder: str) -> bool:
    """Fork a process that outlives the lock's owner, as a loader's worker may."""
    held = CheckpointDirectory(folder)
    held.begin()
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    held.release()
    try:
        CheckpointDirectory(folder).begin()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return True


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    assert run_world(hold_after_fork, 1, str(tmp_path / "state"), state=False) == [True]
