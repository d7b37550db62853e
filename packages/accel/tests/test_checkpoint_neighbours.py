"""Processes that save beside one another: what one of them clears up is never what another is writing, or clearing up
itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_runs import Run, same

from accel_checkpoint import atomic_dir
from accel_checkpoint.atomic_dir import CheckpointDirectory, recover_all, remove_leftovers


def before_first(function: Callable[..., Any], action: Callable[[], Any]) -> Callable[..., Any]:
    """A function whose first call has something else happen before it, as when another process is quicker."""
    left = [action]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return function(*args, **kwargs)

    return call


def test_a_glance_at_the_folder_is_not_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for leftovers locks each for a moment."""
    folder = CheckpointDirectory(tmp_path / "state")
    folder.partial.mkdir()
    glance = atomic_dir._lock(folder.partial)
    monkeypatch.setattr(atomic_dir, "time", SimpleNamespace(sleep=lambda _: atomic_dir._unlock(glance)))
    folder.begin()
    folder.abandon()
    assert os.listdir(tmp_path) == []


def test_a_leftover_is_taken_over_while_another_process_clears_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointDirectory(tmp_path / "state")
    (folder.partial / "of a killed run").mkdir(parents=True)

    def take_over() -> None:
        folder.begin()
        (folder.partial / "mine").touch()

    monkeypatch.setattr(shutil, "rmtree", before_first(shutil.rmtree, take_over))
    remove_leftovers(tmp_path)
    assert os.listdir(folder.partial) == ["mine"]
    folder.abandon()


@pytest.mark.parametrize("safe", [True, False])
def test_what_a_save_deletes_another_process_deletes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    run.train(1)
    monkeypatch.setattr(shutil, "rmtree", before_first(shutil.rmtree, lambda: remove_leftovers(tmp_path)))
    run.accelerator.save_state(tmp_path / "state")
    weights = run.weights()
    run.train(2, done=1)
    run.accelerator.load_state(tmp_path / "state")
    assert same(run.weights(), weights) and os.listdir(tmp_path) == ["state"]


def test_what_a_save_replaces_another_process_clears_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    (tmp_path / "state" / "logs").mkdir()
    entries = before_first(atomic_dir._foreign_entries, lambda: recover_all(tmp_path))
    monkeypatch.setattr(atomic_dir, "_foreign_entries", entries)
    run.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine" and (tmp_path / "state" / "logs").is_dir()
    assert os.listdir(tmp_path) == ["state"]


def test_loading_leaves_a_replacement_alone_that_another_process_is_in_the_middle_of(tmp_path: Path) -> None:
    run = Run()
    folder = CheckpointDirectory(run.accelerator.save_state(tmp_path / "state"))
    folder.begin()
    os.rename(folder.target, folder.replaced)
    with pytest.raises(Exception, match="is a file|does not exist"):
        run.accelerator.load_state(tmp_path / "state")
    assert folder.replaced.exists() and not folder.target.exists()
    folder.abandon()
    run.accelerator.load_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
