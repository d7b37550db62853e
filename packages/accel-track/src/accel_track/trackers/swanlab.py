"""SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..images import named_images
from ..sdk_tracker import SdkRunTracker
from ..serialize import flatten, to_plain


class SwanLabTracker(SdkRunTracker):
    """Logs to a SwanLab run.

    Args:
        run_name: name of the project.
        **kwargs: arguments of ``swanlab.init``; ``mode="local"`` or "offline" stores the run locally.
    """

    name = "swanlab"
    module = "swanlab"
    offline = "Set SWANLAB_MODE=offline to store the run locally and run `swanlab sync` later."

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._sdk().config.update(to_plain(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to the run's ``log``."""
        self.run.log({name: self._value(value) for name, value in flatten(values, "/").items()}, step=step, **kwargs)

    def _value(self, value: Any) -> Any:
        value = self._plain_value(value)
        if isinstance(value, (str, list, type(None))):
            return self._sdk().Text(value if isinstance(value, str) else str(value))
        return value

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step; ``kwargs`` go to the run's ``log``."""
        image = self._sdk().Image
        images = {key: [image(array) for _, array in named_images({key: value})] for key, value in values.items()}
        self.run.log(images, step=step, **kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        settings = kwargs.get("settings") or self._sdk().Settings()
        mode = kwargs.get("mode") or getattr(settings, "mode", None) or "online"
        return getattr(settings, "api_host", None) if mode in ("online", "cloud") else None
