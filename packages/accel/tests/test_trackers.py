"""Trackers of the user's own, on the main process only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel import Accelerator
from accel_state import ConfigurationError
from accel_state.testing import run_world


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
    with pytest.raises(ConfigurationError, match=r"'wandbb' is not a known tracker.*accel.trackers"):
        Accelerator(cpu=True, log_with="wandbb")
    with pytest.raises(ConfigurationError, match=r"lacks name, requires_logging_directory, tracker"):
        Accelerator(cpu=True, log_with=[object()])
    with pytest.raises(ConfigurationError, match=r"'notes' needs a folder for its logs"):
        Accelerator(cpu=True, log_with=Notes)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("run", {})
    accelerator.log({"loss": 1})
    assert accelerator.trackers == []
