"""MLflow."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from accel_state import env
from accel_state.errors import ConfigurationError

from ..images import as_images
from ..rank_info import on_main_process
from ..sdk_tracker import LibraryTracker
from ..serialize import flatten, to_plain

logger = logging.getLogger(__name__)

LONGEST_PARAMETER = 6000
"""Characters that a store keeps of a parameter (``mlflow.utils.validation.MAX_PARAM_VAL_LENGTH``)."""
LARGEST_BATCH = 100
"""Parameters in one request (``mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH``)."""


class MLflowTracker(LibraryTracker):
    """Logs to a run of MLflow.

    The run is used by its id, so MLflow's "active run" of the script's own threads stays what it was. To log to this
    run with ``mlflow.log_...``: ``with mlflow.start_run(run_id=accelerator.get_tracker("mlflow").run_id): ...``.

    Args:
        experiment_name: name of the experiment; the variable MLFLOW_EXPERIMENT_NAME wins.
        logging_dir: where artifacts are stored, for an experiment that does not exist yet.
        run_id: the run to continue; the variable MLFLOW_RUN_ID wins.
        tags: of the run, a dictionary or JSON; the variable MLFLOW_TAGS wins.
        nested_run: make the run a child of the one that is active in the script; the variable MLFLOW_NESTED_RUN wins.
        run_name: name of the run.
        description: of the run.

    Raises:
        ConfigurationError: tags that are neither a dictionary nor JSON, or a nested run without an active one.
    """

    name = "mlflow"
    requires_logging_directory = False
    module = "mlflow"
    offline = "MLFLOW_TRACKING_URI=sqlite:///mlflow.db keeps the run on this machine."

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = env.read_str("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_name = run_name
        self.description = description
        self.tags = _tags(env.read_str("MLFLOW_TAGS") or tags)
        self._given_id = env.read_str("MLFLOW_RUN_ID") or run_id
        self.nested_run = env.parse_flag_from_env("MLFLOW_NESTED_RUN", bool(nested_run))
        self.active_run: Any = None
        self._client: Any = None
        # Which run is active is a matter of the script's thread, and this is called in it.
        self._parent = self._active_parent() if self.nested_run else None

    def _active_parent(self) -> str:
        active = self._library().active_run()
        if active is None:
            raise ConfigurationError(
                "nested_run=True needs a run to be nested in. Make the tracker within `with mlflow.start_run(): ...`."
            )
        return str(active.info.run_id)

    @property
    def tracker(self) -> Any:
        """The ``mlflow.entities.Run``."""
        return self.active_run

    @property
    def run_id(self) -> str | None:
        """The id of the run."""
        return None if self.active_run is None else str(self.active_run.info.run_id)

    @on_main_process
    def start(self) -> None:
        mlflow = self._library()
        uri = mlflow.get_tracking_uri()
        if uri.startswith(("http://", "https://")):
            self._require_server(uri)
        self._client = mlflow.MlflowClient()
        existing = self._given_id or self._resumed_id
        if existing is not None:
            self._client.update_run(existing, status="RUNNING")
            self.active_run = self._client.get_run(existing)
        else:
            self.active_run = self._client.create_run(self._experiment(), tags=self._all_tags(), run_name=self.run_name)

    def _experiment(self) -> str:
        name = self.experiment_name or "Default"
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = None if self.logging_dir is None else str(self.logging_dir)
        return str(self._client.create_experiment(name, artifact_location=location))

    def _all_tags(self) -> dict[str, str]:
        tags = {str(name): str(value) for name, value in self.tags.items()}
        if self.description is not None:
            tags["mlflow.note.content"] = self.description
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent
        return tags

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        known = self._client.get_run(self.run_id).data.params
        texts = {_key(name): _text(value) for name, value in flatten(to_plain(values)).items()}
        changed = [name for name, text in texts.items() if known.get(name, text) != text]
        if changed:
            logger.warning("MLflow keeps the parameters of a run as they were first: %s.", ", ".join(changed))
        param = self._library("mlflow.entities").Param
        for batch in _batches([param(name, text) for name, text in texts.items() if name not in known]):
            self._client.log_batch(self.run_id, params=batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        step = self._at(step)
        now = int(time.time() * 1000)
        metric = self._library("mlflow.entities").Metric
        metrics = [metric(_key(name), number, now, step) for name, number in self._numbers(values).items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000], **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step."""
        step = self._at(step)
        for name, value in values.items():
            for index, image in enumerate(as_images(value)):
                self._client.log_image(
                    self.run_id, image, key=_key(f"{name}_{index}" if index else name), step=step, **kwargs
                )

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Keep a table as ``<table_name>.json``; rows of a data frame are added to those that are there."""
        file = table_name if table_name.endswith(".json") else f"{table_name}.json"
        if dataframe is not None:
            self._client.log_table(self.run_id, dataframe, file)
        else:
            # What log_table writes, without its need for pandas.
            self._client.log_dict(self.run_id, {"columns": columns, "data": to_plain(data)}, file)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure of matplotlib or plotly as an artifact.

        Args:
            figure: the figure.
            artifact_file: path among the run's artifacts.
            **save_kwargs: for the figure's own method that saves it.
        """
        self._client.log_figure(self.run_id, figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Keep all files of a folder.

        Args:
            local_dir: the folder.
            artifact_path: the folder among the run's artifacts to put them into.
        """
        self._client.log_artifacts(self.run_id, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file.

        Args:
            local_path: the file.
            artifact_path: the folder among the run's artifacts to put it into.
        """
        self._client.log_artifact(self.run_id, local_path, artifact_path)

    @on_main_process
    def discard(self) -> None:
        """Delete the run."""
        self.finish()
        self._client.delete_run(self.run_id)

    @on_main_process
    def finish(self) -> None:
        if self.active_run is not None:
            self._client.set_terminated(self.run_id, "FAILED" if self.failed else "FINISHED")


def _tags(tags: Any) -> dict[str, Any]:
    if isinstance(tags, str):
        try:
            tags = json.loads(tags)
        except ValueError as error:
            raise ConfigurationError(
                f"tags={tags!r} is not JSON: {error}. Give a dictionary, or JSON of one."
            ) from None
    if tags is not None and not isinstance(tags, Mapping):
        raise ConfigurationError(f"tags={tags!r} is a {type(tags).__name__}. Give a dictionary, or JSON of one.")
    return dict(tags or {})


def _key(name: str) -> str:
    """A name of the characters that MLflow allows."""
    return "".join(character if character.isalnum() or character in "_-. /:" else "_" for character in name)[:250]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    return text if len(text) <= LONGEST_PARAMETER else text[: LONGEST_PARAMETER - 3] + "..."


def _batches(params: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(params), LARGEST_BATCH):
        yield params[start : start + LARGEST_BATCH]
