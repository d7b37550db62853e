"""Automatic names, the limit, the newest complete one, and folders that cannot be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_runs import (
    Run,
    checkpoints,
    project,
)

from accel import Accelerator
from accel_checkpoint.catalog import newest_complete, rotate
from accel_checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_state import ConfigurationError, context


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
        assert checkpoints(tmp_path) == ["checkpoint_11", "checkpoint_3"], (
            "the one just saved is the newest, whatever its number"
        )


def test_a_limit_of_zero_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path, total_limit=0))
    run.accelerator.save_state()
    run.accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize(
    ("name", "value"), [("total_limit", -1), ("total_limit", 1.5), ("total_limit", "3"), ("iteration", -2)]
)
def test_numbers_that_count_no_checkpoints_are_refused_at_once(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}=.*whole number, 0 or more"):
        project(tmp_path, **{name: value})


def test_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    run = Run(project_config=project(tmp_path))
    for number in range(4):
        run.counter.state["count"] = number
        run.accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3" / "optimizer.bin").unlink()
    (folder / "checkpoint_2" / MANIFEST_NAME).write_text("{")
    (folder / "checkpoint_9").mkdir()
    for asked in (None, "latest"):
        run.accelerator.load_state(asked)
        assert run.counter.state["count"] == 1 and run.accelerator.save_iteration == 2
    assert newest_complete(folder).name == "checkpoint_1"
    for number in (0, 1):
        shutil.rmtree(folder / f"checkpoint_{number}")
    with pytest.raises(ConfigurationError, match=".checkpoint_2, checkpoint_3, checkpoint_9"):
        run.accelerator.load_state()


def test_an_interrupted_rotation_is_finished_by_the_next(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"checkpoint_{number}").mkdir()
    (tmp_path / ".checkpoint_0.accel-deleted").mkdir()
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
        (lambda: accelerator.load_state(tmp_path / "none"), "none does not exist"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            call()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(ConfigurationError, match="project_dir="):
        accelerator.save_state()
    accelerator.project_configuration.project_dir = str(tmp_path)
    with pytest.raises(ConfigurationError, match="no checkpoint_<number>"):
        accelerator.load_state()
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_latest_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine's clock may be put right, or back, between two saves.
    seconds = count()
    clock = SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone) + timedelta(seconds=next(seconds)))
    monkeypatch.setattr("accel_checkpoint.writer.datetime", clock)
    run = Run(project_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="complete checkpoint"):
        run.accelerator.load_state("latest")
    for number, name in enumerate(("b", "c", "a")):
        run.counter.state["count"] = number
        run.accelerator.save_state(tmp_path / name)
    run.accelerator.load_state("latest")
    assert run.counter.state["count"] == 2
    # As a process leaves it that is killed between the two renames of a replacement.
    os.rename(tmp_path / "a", tmp_path / ".a.accel-replaced")
    run.counter.state["count"] = 9
    run.accelerator.load_state("latest")
    assert run.counter.state["count"] == 2 and (tmp_path / "a").is_dir()
    (tmp_path / "a" / MANIFEST_NAME).write_text("")
    run.accelerator.load_state("latest")
    assert run.counter.state["count"] == 1


def test_latest_as_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    with pytest.raises(ConfigurationError, match="needs a directory to look in"):
        run.accelerator.load_state("latest")
    run.counter.state["count"] = 3
    monkeypatch.chdir(tmp_path)
    run.accelerator.save_state("latest")
    run.counter.state["count"] = 0
    run.accelerator.load_state("latest")
    assert run.counter.state["count"] == 3


def test_steps_are_counted_over_runs(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    run.accelerator.save_state(tmp_path / "state")
    with context.isolated():
        other = Run()
        other.accelerator.load_state(tmp_path / "state")
        other.train(1)
        other.accelerator.save_state(tmp_path / "later")
    manifests = [Manifest.read(tmp_path / name) for name in ("state", "later")]
    assert [manifest.counters["optimizer_steps"] for manifest in manifests if manifest] == [8, 16]


def test_arguments_of_save_state_without_an_effect_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())
    accelerator = Run(project_config=project(tmp_path)).accelerator
    saved = accelerator.save_state(tmp_path / "mine", exclude_frozen_parameters=True)
    assert saved == tmp_path / "checkpoints" / "checkpoint_0" and not (tmp_path / "mine").exists()
    assert "save_state got exclude_frozen_parameters, which has no effect with SingleStrategy" in caplog.text
    assert "save_state got output_dir, which has no effect with automatic_checkpoint_naming" in caplog.text
