"""What trackers of other libraries have in common."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from accel_state.errors import AccelError, require
from accel_state.imports import is_package_available

from .base import GeneralTracker
from .rank_info import on_main_process
from .serialize import as_number, flatten, to_plain

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


class ServerUnreachableError(AccelError, ConnectionError):
    """The server of a tracker does not answer."""


class LibraryTracker(GeneralTracker):
    """A tracker over the library of somebody else, which is imported when the run starts.

    Attributes:
        module: what is imported.
        offline: how to do without the server, for messages.
    """

    module: ClassVar[str]
    offline: ClassVar[str] = ""

    def __init__(self, _blank: bool = False) -> None:
        super().__init__(_blank)
        self._resumed_id: str | None = None
        self._resumed_step: int | None = None
        self._step = -1
        self._left_out: set[str] = set()

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library is installed."""
        return is_package_available(cls.module)

    def resume(self, run_id: str, step: int | None = None) -> None:
        self._resumed_id, self._resumed_step = run_id, step
        self._step = -1 if step is None else step

    def _library(self, module: str | None = None) -> ModuleType | Any:
        return require(module or self.module, purpose=f"the tracker {self.name!r}", install=f"accel-track[{self.name}]")

    def _at(self, step: int | None) -> int:
        """The step to log at; without one, that after the last."""
        self._step = self._step + 1 if step is None else step
        return self._step

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, int | float]:
        """The numbers among values, nested ones as ``train/loss``; says once of each other name that it is left out."""
        numbers: dict[str, int | float] = {}
        for name, value in flatten(values, "/").items():
            number = as_number(value)
            if number is not None:
                numbers[name] = number
            elif name not in self._left_out:
                self._left_out.add(name)
                logger.warning(
                    "The tracker %r keeps numbers only: %r, a %s, is left out.", self.name, name, type(value).__name__
                )
        return numbers

    def _plain_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values as the library may have them: single numbers as such, small tensors as lists; objects of the library
        as they are.
        """
        return {name: self._plain_value(value) for name, value in values.items()}

    def _plain_value(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._plain_values(value)
        number = as_number(value)
        if number is not None:
            return number
        return to_plain(value) if type(value).__module__ in ("torch", "numpy") else value

    def _require_server(self, url: str | None) -> None:
        """Raise ServerUnreachableError where a server does not answer within seconds: the library itself may try for
        minutes.
        """
        if url and not answers(url, ANSWER_SECONDS):
            raise ServerUnreachableError(
                f"the server {url} does not answer within {ANSWER_SECONDS:g} s. {self.offline}".strip()
            )


class RunTracker(LibraryTracker):
    """A tracker over a library whose ``init`` begins a run of a project.

    Args:
        run_name: name of the project.
        **kwargs: for the library's ``init``.

    Attributes:
        run: the library's run, once started.
        id_word: what the run calls that by which it can be continued, and ``init`` likewise.
    """

    requires_logging_directory = False
    id_word: ClassVar[str] = "id"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The library's run."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """What names the run at the back end."""
        return None if self.run is None else str(getattr(self.run, self.id_word))

    @on_main_process
    def start(self) -> None:
        kwargs = {"project": self.run_name, **self._kwargs}
        if self._resumed_id is not None:
            kwargs.setdefault(self.id_word, self._resumed_id)
            kwargs.setdefault("resume", "allow")
        self._require_server(self._server(kwargs))
        self.run = self._library().init(**kwargs)

    def _server(self, kwargs: Mapping[str, Any]) -> str | None:
        """The address that a run is going to talk to, or None where it keeps to this machine."""
        raise NotImplementedError

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step; ``kwargs`` go to the run's ``log``."""
        self.run.log(self._plain_values(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


def answers(url: str, timeout: float) -> bool:
    """Whether a server answers a request in any way.

    Args:
        url: http, https, or another scheme with host and port, where a connection is enough.
        timeout: seconds.
    """
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme not in ("http", "https"):
            socket.create_connection((parts.hostname, parts.port), timeout).close()
        else:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=timeout).close()
    except urllib.error.HTTPError as error:
        error.close()  # refused, but by a server
    except urllib.error.URLError as error:
        # A certificate that we cannot check may be one that the library can.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, http.client.HTTPException):
        return False
    return True
