"""ClearML."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from accel_state import env

from ..images import named_images
from ..sdk_tracker import SdkTracker
from ..serialize import flatten, to_plain

_SPLIT = re.compile(r"(train|eval|test|val|valid|validation)[_/](.+)")


class ClearMLTracker(SdkTracker):
    """Logs to the current ClearML task, or to a new one.

    ``eval_loss`` and ``train/loss`` become the series ``eval`` and ``train`` of the chart ``loss``; any other name gets
    its own chart.

    Args:
        run_name: name of the project and the task; overridden by the variables CLEARML_PROJECT and CLEARML_TASK.
        **kwargs: arguments of ``Task.init``. By default ``auto_connect_frameworks`` excludes TensorBoard, which would
            duplicate every value, and torch, which would upload every checkpoint.
    """

    task: Any
    name = "clearml"
    module: ClassVar[str] = "clearml"
    handle: ClassVar[str] = "task"
    id_attribute: ClassVar[str] = "id"
    offline = "Set CLEARML_OFFLINE_MODE=1 to store the task locally and call Task.import_offline_session later."

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._owns_task = False

    def start(self) -> None:
        clearml = self._sdk()
        self.task = clearml.Task.current_task()
        if self.task is not None:
            return
        kwargs = {
            "project_name": env.read_str("CLEARML_PROJECT") or self.user_provided_run_name,
            "task_name": env.read_str("CLEARML_TASK") or self.user_provided_run_name,
            "auto_connect_frameworks": {"tensorboard": False, "pytorch": False},
            **self._kwargs,
        }
        if not clearml.Task.is_offline():
            self._require_server(self._sdk("clearml.backend_api").Session.get_api_server_host())
            if self._resumed_id is not None:
                kwargs.setdefault("continue_last_task", self._resumed_id)
        # ClearML would fork a process for reporting, which may deadlock with the threads of torch and other trackers.
        clearml.Task._report_subprocess_enabled = False
        self.task = clearml.Task.init(**kwargs)
        self._owns_task = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(configuration=to_plain(values), name="config")
        self.task.set_parameters({f"General/{name}": value for name, value in flatten(to_plain(values), "/").items()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values: ``kwargs`` go to ``report_scalar``, or to ``report_single_value`` without a step."""
        report = self.task.get_logger()
        for name, number in self._numbers(values).items():
            if step is None:
                report.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _title_and_series(name)
                report.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step; ``kwargs`` go to ``report_image``."""
        report = self.task.get_logger()
        for key, value in values.items():
            title, series = _title_and_series(key)
            for name, image in named_images({series: value}):
                report.report_image(title=title, series=name, iteration=step or 0, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; ``kwargs`` go to ``report_table``."""
        title, series = _title_and_series(table_name)
        content = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        self.task.get_logger().report_table(
            title=title, series=series, iteration=step or 0, table_plot=content, **kwargs
        )

    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as an artifact; ``kwargs`` go to ``upload_artifact``."""
        name = f"{artifact_path.strip('/')}/" if artifact_path else ""
        self.task.upload_artifact(
            name + local_path.replace("\\", "/").rsplit("/", 1)[-1], local_path, wait_on_upload=True, **kwargs
        )

    def finish(self) -> None:
        if self.task is None or not self._owns_task:
            return
        if self.failed:
            self.task.mark_failed(status_reason="the script ended with an exception")
        self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    match = _SPLIT.fullmatch(name)
    return (match[2], match[1]) if match else (name, name)
