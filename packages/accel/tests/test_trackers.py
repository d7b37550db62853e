"""Trackers of the user's own, on the main process only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator, TrackingKwargs
from accel.tracking import TrackerError
from accel_state import ConfigurationError
from accel_state.testing import run_world
from accel_track import find_runs


class Notes:
    """A tracker that writes lines to a file."""

    name = "notes"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, suffix: str = "txt") -> None:
        self.path = Path(logging_dir) / f"{run_name}.{suffix}"

    @property
    def tracker(self) -> Path:
        return self.path

    def _write(self, *values: Any) -> None:
        with self.path.open("a") as file:
            print(*values, file=file)

    def start(self) -> None:
        self._write("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write(step, values, kwargs)

    def finish(self) -> None:
        self._write("finish")


EXPECTED = "start\nconfig {'lr': 0.1}\n3 {'loss': 2.0} {'prefix': 'train'}\nfinish\n"


def log_a_run(folder: str) -> str:
    accelerator = Accelerator(cpu=True, log_with=Notes, project_dir=folder)
    accelerator.init_trackers("run", {"lr": 0.1}, {"notes": {"suffix": "log"}})
    accelerator.log({"loss": 2.0}, step=3, log_kwargs={"notes": {"prefix": "train"}})
    accelerator.get_tracker("notes").path  # noqa: B018  (on other ranks an object that does nothing)
    own = accelerator.get_tracker("notes", unwrap=True)
    with pytest.raises(ConfigurationError, match=r"no tracker 'wandb' was started"):
        accelerator.get_tracker("wandb")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return type(own).__name__


def test_one_run_a_job(tmp_path: Path) -> None:
    kinds = run_world(log_a_run, 2, str(tmp_path))
    assert kinds[1] == "Silence" and "Path" in kinds[0]
    assert (tmp_path / "run.log").read_text() == EXPECTED


def test_objects_are_used_as_they_are(tmp_path: Path) -> None:
    notes = Notes("mine", str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with=[notes], project_dir=tmp_path)
    accelerator.init_trackers("ignored")
    assert accelerator.get_tracker("notes") is notes
    accelerator.end_training()
    assert notes.path.read_text() == "start\nfinish\n"


def test_what_is_no_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'wandbb'.*tracker.*accel.trackers"):
        Accelerator(cpu=True, log_with="wandbb")
    with pytest.raises(ConfigurationError, match="requires_logging_directory"):
        Accelerator(cpu=True, log_with=[object()])
    with pytest.raises(ConfigurationError, match=r"'notes' needs a logging directory"):
        Accelerator(cpu=True, log_with=Notes)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("run", {})
    accelerator.log({"loss": 1})
    assert accelerator.trackers == []


class Broken(Notes):
    """Fails where it is told to."""

    name = "broken"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise OSError("the disk is full")


def test_a_failure_is_a_warning_unless_it_is_to_be_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, log_with=[Broken, "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=0)
    assert [tracker.name for tracker in accelerator.trackers] == ["jsonl"]
    accelerator.get_tracker("broken").log({"loss": 2.0})
    accelerator.end_training()
    assert "The tracker 'broken' failed in log() and is disabled: OSError: the disk is full" in caplog.text
    strict = Accelerator(cpu=True, log_with=Broken, project_dir=tmp_path, kwargs_handlers=[TrackingKwargs(strict=True)])
    strict.init_trackers("run")
    strict.log({"loss": 1.0})
    with pytest.raises(TrackerError, match="the disk is full"):
        strict.end_training()
    with pytest.raises(ConfigurationError, match="queue_size=0 must be positive"):
        Accelerator(cpu=True, kwargs_handlers=[TrackingKwargs(queue_size=0)])


def train(folder: str, steps: range, load: str, load_first: bool) -> str | None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=f"{folder}/logs")
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if load and load_first:
        accelerator.load_state(load)
    accelerator.init_trackers("run", {"steps": len(steps)})
    if load and not load_first:
        accelerator.load_state(load)
    for step in steps:
        accelerator.log({"loss": torch.tensor(float(step)), "part": 1 if load else 0}, step=step)
        if step == 3:
            accelerator.save_state(f"{folder}/state")
    run_id = getattr(accelerator.get_tracker("jsonl"), "run_id", None)
    accelerator.end_training()
    return run_id if accelerator.is_main_process else None


@pytest.mark.parametrize("load_first", [True, False])
def test_a_resumed_job_continues_the_run(load_first: bool, tmp_path: Path) -> None:
    (first, _) = run_world(train, 2, str(tmp_path), range(6), "", True)
    (second, _) = run_world(train, 2, str(tmp_path), range(4, 8), str(tmp_path / "state"), load_first)
    assert first == second
    saved = json.loads((tmp_path / "state" / "trackers.json").read_text())
    assert saved == {"trackers": {"jsonl": {"run_id": first, "step": 3}}}
    (run,) = find_runs(tmp_path / "logs")
    assert run.series()["loss"] == [(step, step) for step in range(8)]
    assert run.series()["part"] == [(step, int(step > 3)) for step in range(8)]
