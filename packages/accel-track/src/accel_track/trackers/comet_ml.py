"""Comet."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, ClassVar

from ..images import named_images
from ..sdk_tracker import SdkTracker
from ..serialize import as_number, flatten, to_plain


class CometMLTracker(SdkTracker):
    """Logs to a ``CometExperiment``.

    Args:
        run_name: name of the project.
        **kwargs: arguments of ``comet_ml.start``; ``online=False`` stores the experiment locally.
    """

    writer: Any
    name = "comet_ml"
    module: ClassVar[str] = "comet_ml"
    handle: ClassVar[str] = "writer"
    finish_method: ClassVar[str] = "end"
    offline = "Pass init_kwargs={'comet_ml': {'online': False}} to store it locally and run `comet upload` later."

    @property
    def run_id(self) -> str | None:
        return None if self.writer is None else str(self.writer.get_key())

    def start(self) -> None:
        comet = self._sdk()
        kwargs = {"project_name": self.run_name, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault("experiment_key", self._resumed_id)
            kwargs.setdefault("mode", "get_or_create")
        if kwargs.get("online") is not False:
            self._require_server(comet.config.get_config("comet.url_override"))
        self.writer = comet.start(**kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(flatten(to_plain(values)), nested_support=False)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to ``log_metric`` (numbers) or ``log_other`` (texts)."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in flatten(values, "/").items():
            number = as_number(value)
            if number is not None:
                self.writer.log_metric(name, number, step=step, **kwargs)
            else:
                self.writer.log_other(name, value if isinstance(value, str) else str(to_plain(value)), **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step; ``kwargs`` go to ``log_image``."""
        for name, image in named_images(values):
            self.writer.log_image(image, name=name, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table as ``<table_name>.csv``; ``kwargs`` go to ``log_table``."""
        filename = table_name if table_name.endswith((".csv", ".tsv", ".json")) else f"{table_name}.csv"
        if dataframe is not None:
            columns, data = [str(column) for column in dataframe.columns], dataframe.to_numpy().tolist()
        self.writer.log_table(filename, tabular_data=data, headers=columns or False, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as an asset; ``kwargs`` go to ``log_asset``."""
        name = str(PurePosixPath(artifact_path or "") / PurePosixPath(local_path).name)
        self.writer.log_asset(local_path, file_name=name, **kwargs)
