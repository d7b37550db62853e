"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..images import named_images
from ..sdk_tracker import SdkRunTracker
from ..serialize import to_plain


class TrackioTracker(SdkRunTracker):
    """Logs to a Trackio run: local, on a Hugging Face Space, or on a self-hosted server.

    Args:
        run_name: name of the project.
        **kwargs: arguments of ``trackio.init``.
    """

    name = "trackio"
    module = "trackio"
    offline = "Without server_url, the run is stored locally."
    id_attribute = "name"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **{"embed": False, **kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(to_plain(values))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step; further images of one name get a number."""
        image = self._sdk().Image
        images = {}
        for name, array in named_images(values, squeeze=False):
            images[name] = image(array.repeat(3, axis=2) if array.shape[-1] == 1 else array)
        self.run.log(images, step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as an artifact; ``kwargs`` go to the run's ``log_artifact``."""
        self.run.log_artifact(local_path, **kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        url: str | None = kwargs.get("server_url")
        return url
