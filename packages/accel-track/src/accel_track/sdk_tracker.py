"""Common parts of the trackers that wrap another library's SDK."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar, Final

from accel_state.errors import AccelError, require
from accel_state.imports import is_package_available

from .base import GeneralTracker
from .rank_info import on_main_process
from .serialize import as_number, flatten, to_plain

logger: Final = logging.getLogger(__name__)

RESPONSE_SECONDS = 10.0
_OPTIONAL_METHODS = ("log_images", "log_table", "log_figure", "log_artifact", "log_artifacts")


class ServerUnreachableError(AccelError, ConnectionError):
    """The server of a tracker does not respond."""


class SdkTracker(GeneralTracker):
    """A tracker that wraps a library, which is imported when the run starts. Its methods run on the main process only.

    Args:
        run_name: name of the run, project or experiment.
        **kwargs: arguments of the SDK's function or class that starts a run.
    """

    requires_logging_directory = False

    module: ClassVar[str]  # the module to import
    offline: ClassVar[str] = ""  # how to work without the server, for error messages
    handle: ClassVar[str]  # attribute with the SDK's object of the run, or None before the start
    id_attribute: ClassVar[str]  # attribute of that object that identifies a run to resume
    finish_method: ClassVar[str]  # method of that object that ends the run

    def __init_subclass__(cls) -> None:
        for method in ("start", "store_init_configuration", "log", "discard", "finish", *_OPTIONAL_METHODS):
            if method in vars(cls):
                setattr(cls, method, on_main_process(vars(cls)[method]))

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        setattr(self, self.handle, None)
        self._kwargs = kwargs
        self._resumed_id: str | None = None
        self._resumed_step: int | None = None
        self._step = -1
        self._reported_names: set[str] = set()

    @classmethod
    def is_available(cls) -> bool:
        """Return True if the library is installed."""
        return is_package_available(cls.module)

    @property
    def tracker(self) -> Any:
        """The SDK's object of the run."""
        return getattr(self, self.handle)

    @property
    def run_id(self) -> str | None:
        return None if self.tracker is None else str(attrgetter(self.id_attribute)(self.tracker))

    @on_main_process
    def finish(self) -> None:
        if self.tracker is not None:
            getattr(self.tracker, self.finish_method)()

    def resume(self, run_id: str, step: int | None = None) -> None:
        self._resumed_id, self._resumed_step = run_id, step
        self._step = -1 if step is None else step

    def _sdk(self, module: str | None = None) -> ModuleType | Any:
        return require(module or self.module, purpose=f"the tracker {self.name!r}", install=f"accel-track[{self.name}]")

    def _step_or_next(self, step: int | None) -> int:
        """Return the step to log at: ``step``, or the one after the last."""
        self._step = self._step + 1 if step is None else step
        return self._step

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, int | float]:
        """Return the numeric values, nested ones as ``train/loss``; warns once about each name with another type."""
        numbers: dict[str, int | float] = {}
        for name, value in flatten(values, "/").items():
            number = as_number(value)
            if number is not None:
                numbers[name] = number
            elif name not in self._reported_names:
                self._reported_names.add(name)
                logger.warning(
                    "The tracker %r logs only numbers; %r of type %s is skipped.", self.name, name, type(value).__name__
                )
        return numbers

    def _plain_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._plain_value(value) for name, value in values.items()}

    def _plain_value(self, value: Any) -> Any:
        """Convert scalars to Python numbers and small tensors to lists; keep objects of the SDK."""
        if isinstance(value, Mapping):
            return self._plain_values(value)
        number = as_number(value)
        if number is not None:
            return number
        return to_plain(value) if type(value).__module__ in ("torch", "numpy") else value

    def _require_server(self, url: str | None) -> None:
        """Raise ServerUnreachableError if a server does not respond; the SDK itself may retry for minutes."""
        if url and not responds(url, RESPONSE_SECONDS):
            raise ServerUnreachableError(
                f"the server {url} does not respond within {RESPONSE_SECONDS:g} s. {self.offline}".strip()
            )


class SdkRunTracker(SdkTracker):
    """A tracker for SDKs whose ``init`` starts a run of a project."""

    handle = "run"
    id_attribute = "id"  # also the argument of init that resumes a run
    finish_method = "finish"

    run: Any  # the SDK's run, once started

    def start(self) -> None:
        kwargs = {"project": self.run_name, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault(self.id_attribute, self._resumed_id)
            kwargs.setdefault("resume", "allow")
        self._require_server(self._server(kwargs))
        self.run = self._sdk().init(**kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        """URL of the server for a run with these arguments; None for an offline run."""
        raise NotImplementedError

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to the run's ``log``."""
        self.run.log(self._plain_values(values), step=step, **kwargs)


def responds(url: str, timeout: float) -> bool:
    """Return True if a server responds with any HTTP status.

    For schemes other than http(s), an open port is enough.
    """
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme not in ("http", "https"):
            socket.create_connection((parts.hostname, parts.port), timeout).close()
        else:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=timeout).close()
    except urllib.error.HTTPError as error:
        error.close()  # an error status is a response too
    except urllib.error.URLError as error:
        # The SDK may accept a certificate that this check cannot verify.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, http.client.HTTPException):
        return False
    return True
