"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ..images import as_images
from ..sdk_tracker import SdkRunTracker
from ..serialize import to_plain


class WandBTracker(SdkRunTracker):
    """Logs to a Weights & Biases run.

    Args:
        run_name: name of the project.
        **kwargs: arguments of ``wandb.init``.
    """

    name = "wandb"
    module = "wandb"
    offline = "Set WANDB_MODE=offline to store the run locally and run `wandb sync` later."

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(to_plain(values), allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step; ``kwargs`` go to the run's ``log``."""
        image = self._sdk().Image
        images = {name: [image(array) for array in as_images(value)] for name, value in values.items()}
        self.run.log(images, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; ``kwargs`` go to the run's ``log``."""
        table = self._sdk().Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as an artifact; ``kwargs`` go to ``wandb.Artifact``."""
        name = PurePosixPath(local_path).name
        artifact = self._sdk().Artifact(**{"name": f"run-{self.run.id}-{name}", "type": "file", **kwargs})
        artifact.add_file(local_path, name=str(PurePosixPath(artifact_path or "") / name))
        self.run.log_artifact(artifact)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=1 if self.failed else 0)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        settings = self._sdk().Settings()
        overrides = kwargs.get("settings") or {}
        if not isinstance(overrides, Mapping):
            overrides = overrides.model_dump(exclude_unset=True)
        mode = kwargs.get("mode") or overrides.get("mode") or settings.mode
        return str(overrides.get("base_url") or settings.base_url) if mode in ("online", "run", "shared") else None
