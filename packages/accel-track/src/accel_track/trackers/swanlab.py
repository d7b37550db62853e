"""SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..images import as_images
from ..library import LibraryTracker
from ..process import on_main_process
from ..values import flatten, to_plain


class SwanLabTracker(LibraryTracker):
    """Logs to a run of SwanLab.

    Args:
        run_name: name of the project.
        **kwargs: for ``swanlab.init``; ``mode="local"`` or "offline" keeps the run on this machine.
    """

    name = "swanlab"
    requires_logging_directory = False
    module = "swanlab"
    offline = "SWANLAB_MODE=offline keeps the run on this machine, for `swanlab sync` to upload later."

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The run of SwanLab."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """The id of the run."""
        return None if self.run is None else str(self.run.id)

    @on_main_process
    def start(self) -> None:
        swanlab = self._library()
        kwargs = {"project": self.run_name, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault("id", self._resumed_id)
            kwargs.setdefault("resume", "allow")
        self._require_server(_server(swanlab, kwargs))
        self.run = swanlab.init(**kwargs)

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
        pictures = {name: [image(one[..., 0] if one.shape[-1] == 1 else one) for one in as_images(value)] for name, value in values.items()}
        self.run.log(pictures, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


def _server(swanlab: Any, kwargs: Mapping[str, Any]) -> str | None:
    """The address that a run is going to talk to, or None where it keeps to this machine."""
    settings = kwargs.get("settings") or swanlab.Settings()
    mode = kwargs.get("mode") or getattr(settings, "mode", None) or "online"
    return getattr(settings, "api_host", None) if mode in ("online", "cloud") else None
