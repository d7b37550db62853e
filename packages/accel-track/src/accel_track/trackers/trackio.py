"""Trackio."""

from __future__ import annotations

from typing import Any

from ..images import as_images
from ..library import LibraryTracker
from ..process import on_main_process
from ..values import to_plain


class TrackioTracker(LibraryTracker):
    """Logs to a run of Trackio: on this machine, on a Space of Hugging Face, or on a server of yours.

    Args:
        run_name: name of the project.
        **kwargs: for ``trackio.init``.
    """

    name = "trackio"
    requires_logging_directory = False
    module = "trackio"
    offline = "Without server_url, the run is kept on this machine."

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The run of Trackio."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """The name of the run."""
        return None if self.run is None else str(self.run.name)

    @on_main_process
    def start(self) -> None:
        kwargs = {"project": self.run_name, "embed": False, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault("name", self._resumed_id)
            kwargs.setdefault("resume", "allow")
        self._require_server(kwargs.get("server_url"))
        self.run = self._library().init(**kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step; ``kwargs`` go to the run's ``log``."""
        self.run.log(self._plain_values(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step; several of one name get a number."""
        image = self._library().Image
        pictures = {}
        for name, value in values.items():
            for index, one in enumerate(as_images(value)):
                pictures[f"{name}_{index}" if index else name] = image(one.repeat(3, axis=2) if one.shape[-1] == 1 else one)
        self.run.log(pictures, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Keep a file as an artifact; ``kwargs`` go to the run's ``log_artifact``."""
        self.run.log_artifact(local_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
