"""The Accelerator's side of experiment trackers; the work is done by accel_track."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accel_state import PartialState, get_logger
from accel_track.tracking import Settings, TrackerRun

from ..checkpoint.weights_io import write_atomically
from ..kwargs.handlers import TrackingKwargs

logger = get_logger(__name__)

RUNS_NAME = "trackers"


class Tracking:
    """The Accelerator's methods for trackers; its constructor calls :meth:`_init_tracking`."""

    process_state: PartialState

    def _init_tracking(
        self, log_with: Any, logging_dir: str | os.PathLike[str] | None, settings: TrackingKwargs
    ) -> None:
        self._run = TrackerRun(log_with, logging_dir, delivery=settings.to_delivery())

    @property
    def log_with(self) -> list[Any]:
        """The tracker classes and objects that were asked for."""
        return self._run.log_with

    @property
    def trackers(self) -> list[Any]:
        """The trackers that run in this process, when they have been given everything that was logged."""
        return self._run.trackers

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Settings = None) -> None:
        """Start a run in every tracker.

        Args:
            project_name: name of the project or experiment.
            config: hyperparameters to keep with the run: a dictionary, a namespace of argparse, or a data class; values
                of any kind.
            init_kwargs: further arguments for a tracker's constructor, by the tracker's name.

        Raises:
            ConfigurationError: a config of another kind.
            TrackerError: in strict mode (TrackingKwargs), a tracker failed to start.
        """
        self._run.init_trackers(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log values to every tracker, as they are now; they are delivered in the background.

        Args:
            values: names to numbers, tensors (on any device), texts, or what else the trackers take.
            step: the step they belong to.
            log_kwargs: further arguments for a tracker's ``log``, by the tracker's name.

        Raises:
            ConfigurationError: ``values`` is no dictionary.
            TrackerError: in strict mode, a tracker failed since the last call.
        """
        self._run.log(values, step, log_kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Settings = None) -> None:
        """Log images to every tracker that keeps images; see :meth:`accel_track.TrackerRun.log_images`."""
        self._run.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Settings = None,
    ) -> None:
        """Log a table to every tracker that keeps tables; see :meth:`accel_track.TrackerRun.log_table`."""
        self._run.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, log_kwargs: Settings = None
    ) -> None:
        """Keep a file in every tracker that keeps files; see :meth:`accel_track.TrackerRun.log_artifact`."""
        self._run.log_artifact(local_path, artifact_path, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; where it does not run, an object whose methods do nothing.

        Args:
            name: the tracker's name.
            unwrap: return the object of the tracker's own library.

        Raises:
            ConfigurationError: no tracker of that name was started.
        """
        return self._run.get_tracker(name, unwrap)

    def _finish_trackers(self) -> None:
        self._run.finish()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_runs(self, folder: Path) -> None:
        """Write which runs this rank is in, for a resumed job to continue them."""
        state = self._run.state_dict()
        if state["trackers"]:
            write_atomically(folder / self._runs_file(), partial(_write_json, state))

    def _load_runs(self, folder: Path) -> None:
        """Continue the runs of a checkpoint."""
        path = folder / self._runs_file()
        if path.is_file():
            self._run.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    def _runs_file(self) -> str:
        rank = self.process_state.process_index
        return f"{RUNS_NAME}.json" if rank == 0 else f"{RUNS_NAME}_{rank}.json"


def _write_json(content: Any, path: str) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
