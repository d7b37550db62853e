"""MLflow."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from accel_state import env
from accel_state.errors import ConfigurationError

from ..images import named_images
from ..sdk_tracker import SdkTracker
from ..serialize import flatten, to_plain

logger: Final = logging.getLogger(__name__)

# Limits of a parameter's value, and of parameters in one request: MAX_PARAM_VAL_LENGTH and MAX_PARAMS_TAGS_PER_BATCH
# in mlflow.utils.validation.
MAX_PARAMETER_LENGTH = 6000
MAX_PARAMETERS_PER_REQUEST = 100


class MLflowTracker(SdkTracker):
    """Logs to an MLflow run.

    MLflow's active run in the script's threads does not change. To log to this run with ``mlflow.log_...``, use
    ``with mlflow.start_run(run_id=accelerator.get_tracker("mlflow").run_id): ...``.

    Args:
        experiment_name: name of the experiment; overridden by the variable MLFLOW_EXPERIMENT_NAME.
        logging_dir: artifact location of an experiment that does not exist yet.
        run_id: the run to continue; overridden by MLFLOW_RUN_ID.
        tags: tags of the run, a dictionary or JSON; overridden by MLFLOW_TAGS.
        nested_run: make the run a child of the script's active run; overridden by MLFLOW_NESTED_RUN.
        run_name: name of the run.
        description: description of the run.

    Raises:
        ConfigurationError: ``tags`` is neither a dictionary nor JSON, or ``nested_run`` without an active run.
    """

    active_run: Any
    name = "mlflow"
    module: ClassVar[str] = "mlflow"
    handle: ClassVar[str] = "active_run"
    id_attribute: ClassVar[str] = "info.run_id"
    offline = "Set MLFLOW_TRACKING_URI=sqlite:///mlflow.db to store the run locally."

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
        super().__init__(run_name)
        self.experiment_name: str | None = env.read_str("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.description = description
        self.tags: dict[str, Any] = _tags(env.read_str("MLFLOW_TAGS") or tags)
        self._existing_id = env.read_str("MLFLOW_RUN_ID") or run_id
        self.nested_run: bool = env.parse_flag_from_env("MLFLOW_NESTED_RUN", bool(nested_run))
        self._client: Any = None
        # The active run is thread-local, and the constructor is called in the script's thread.
        self._parent = self._active_parent() if self.nested_run else None

    def _active_parent(self) -> str:
        active = self._sdk().active_run()
        if active is None:
            raise ConfigurationError(
                "nested_run=True needs an active run. Create the tracker within `with mlflow.start_run(): ...`."
            )
        return str(active.info.run_id)

    def start(self) -> None:
        mlflow = self._sdk()
        uri = mlflow.get_tracking_uri()
        if uri.startswith(("http://", "https://")):
            self._require_server(uri)
        self._client = mlflow.MlflowClient()
        existing = self._existing_id or self._resumed_id
        if existing is not None:
            self._client.update_run(existing, status="RUNNING")
            self.active_run = self._client.get_run(existing)
        else:
            self.active_run = self._client.create_run(self._experiment(), tags=self._all_tags(), run_name=self.run_name)

    def _experiment(self) -> str:
        name = self.experiment_name or "Default"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None if self.logging_dir is None else str(self.logging_dir)
        return str(self._client.create_experiment(name, artifact_location=location))

    def _all_tags(self) -> dict[str, str]:
        tags = {str(name): str(value) for name, value in self.tags.items()}
        if self.description is not None:
            tags["mlflow.note.content"] = self.description
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent
        return tags

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        known = self._client.get_run(self.run_id).data.params
        texts = {_key(name): _text(value) for name, value in flatten(to_plain(values)).items()}
        changed = [name for name, text in texts.items() if known.get(name, text) != text]
        if changed:
            logger.warning("MLflow cannot change parameters of a run; these keep their values: %s.", ", ".join(changed))
        param = self._sdk("mlflow.entities").Param
        params = [param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(params), MAX_PARAMETERS_PER_REQUEST):
            self._client.log_batch(self.run_id, params=params[start : start + MAX_PARAMETERS_PER_REQUEST])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        step = self._step_or_next(step)
        now = int(time.time() * 1000)
        metric = self._sdk("mlflow.entities").Metric
        metrics = [metric(_key(name), number, now, step) for name, number in self._numbers(values).items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000], **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step."""
        step = self._step_or_next(step)
        for name, image in named_images(values, squeeze=False):
            self._client.log_image(self.run_id, image, key=_key(name), step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table as ``<table_name>.json``; rows of a data frame are appended to existing ones."""
        file = table_name if table_name.endswith(".json") else f"{table_name}.json"
        if dataframe is not None:
            self._client.log_table(self.run_id, dataframe, file)
        else:
            # The format of log_table, without pandas.
            self._client.log_dict(self.run_id, {"columns": columns, "data": to_plain(data)}, file)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a matplotlib or plotly figure as the artifact ``artifact_file``.

        ``save_kwargs`` go to the figure's method that saves it.
        """
        self._client.log_figure(self.run_id, figure, artifact_file, save_kwargs=save_kwargs or None)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of a directory in the directory ``artifact_path`` of the run's artifacts."""
        self._client.log_artifacts(self.run_id, local_dir, artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file in the directory ``artifact_path`` of the run's artifacts."""
        self._client.log_artifact(self.run_id, local_path, artifact_path)

    def discard(self) -> None:
        """Delete the run."""
        self.finish()
        self._client.delete_run(self.run_id)

    def finish(self) -> None:
        if self.active_run is not None:
            self._client.set_terminated(self.run_id, "FAILED" if self.failed else "FINISHED")


def _tags(tags: Any) -> dict[str, Any]:
    if isinstance(tags, str):
        try:
            tags = json.loads(tags)
        except ValueError as error:
            raise ConfigurationError(
                f"tags={tags!r} is not JSON: {error}. Pass a dictionary or a JSON object."
            ) from None
    if tags is not None and not isinstance(tags, Mapping):
        raise ConfigurationError(f"tags={tags!r} is of type {type(tags).__name__}. Pass a dictionary or a JSON object.")
    return dict(tags or {})


def _key(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)[:250]


def _text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    return text if len(text) <= MAX_PARAMETER_LENGTH else text[: MAX_PARAMETER_LENGTH - 3] + "..."
