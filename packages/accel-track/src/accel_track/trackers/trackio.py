"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..images import as_images
from ..rank_info import on_main_process
from ..sdk_tracker import RunTracker
from ..serialize import to_plain


class TrackioTracker(RunTracker):
    """Logs to a run of Trackio: on this machine, on a Space of Hugging Face, or on a server of yours.

    Args:
        run_name: name of the project.
        **kwargs: for ``trackio.init``.
    """

    name = "trackio"
    module = "trackio"
    offline = "Without server_url, the run is kept on this machine."
    id_word = "name"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **{"embed": False, **kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(to_plain(values))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step; several of one name get a number."""
        image = self._library().Image
        pictures = {}
        for name, value in values.items():
            for index, one in enumerate(as_images(value)):
                pictures[f"{name}_{index}" if index else name] = image(
                    one.repeat(3, axis=2) if one.shape[-1] == 1 else one
                )
        self.run.log(pictures, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Keep a file as an artifact; ``kwargs`` go to the run's ``log_artifact``."""
        self.run.log_artifact(local_path, **kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        url: str | None = kwargs.get("server_url")
        return url
