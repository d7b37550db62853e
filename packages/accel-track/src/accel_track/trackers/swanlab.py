"""SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..images import as_images
from ..rank_info import on_main_process
from ..sdk_tracker import RunTracker
from ..serialize import flatten, to_plain


class SwanLabTracker(RunTracker):
    """Logs to a run of SwanLab.

    Args:
        run_name: name of the project.
        **kwargs: for ``swanlab.init``; ``mode="local"`` or "offline" keeps the run on this machine.
    """

    name = "swanlab"
    module = "swanlab"
    offline = "SWANLAB_MODE=offline keeps the run on this machine, for `swanlab sync` to upload later."

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._library().config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step; ``kwargs`` go to the run's ``log``."""
        self.run.log({name: self._value(value) for name, value in flatten(values, "/").items()}, step=step, **kwargs)

    def _value(self, value: Any) -> Any:
        value = self._plain_value(value)
        if isinstance(value, (str, list, type(None))):
            return self._library().Text(value if isinstance(value, str) else str(value))
        return value

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step; ``kwargs`` go to the run's ``log``."""
        image = self._library().Image
        pictures = {
            name: [image(one[..., 0] if one.shape[-1] == 1 else one) for one in as_images(value)]
            for name, value in values.items()
        }
        self.run.log(pictures, step=step, **kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        settings = kwargs.get("settings") or self._library().Settings()
        mode = kwargs.get("mode") or getattr(settings, "mode", None) or "online"
        return getattr(settings, "api_host", None) if mode in ("online", "cloud") else None
