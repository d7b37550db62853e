"""Experiment trackers: which ones a run logs to, and the calls that reach them.

The trackers themselves come from other distributions, by entry point, or from the user as objects. Only the main process talks
to a tracker, unless its class says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from accel_state import ConfigurationError, PartialState
from accel_state.registry import Registry
from accel_state.state import do_nothing

from .project import ProjectConfiguration


class Tracker(Protocol):
    """What an Accelerator asks of a tracker. Its constructor takes the project's name first."""

    name: str
    requires_logging_directory: bool

    @property
    def tracker(self) -> Any:
        """The object of the tracker's own library."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step."""


TRACKERS: Registry[Any] = Registry("tracker", {}, entry_point_group="accel.trackers")
_REQUIRED = ("name", "requires_logging_directory", "tracker", "store_init_configuration", "log")


class Silence:
    """Stands in for a tracker on processes that do not log: every method of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return do_nothing


def resolve(log_with: Any, logging_dir: str | None) -> list[Any]:
    """The classes and objects that ``log_with`` asks for: a name, "all", an object, or a list of those.

    Raises:
        ConfigurationError: a name that is not known, an object that is no tracker, or a missing folder for logs.
    """
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    names = [str(item) for item in asked if isinstance(item, str)]
    chosen = [item for item in asked if not isinstance(item, str)]
    for name in TRACKERS.names() if "all" in names else dict.fromkeys(names):
        chosen.append(TRACKERS.load(name))
    for tracker in chosen:
        _check(tracker, logging_dir)
    return chosen


def _check(tracker: Any, logging_dir: str | None) -> None:
    missing = [attribute for attribute in _REQUIRED if not hasattr(tracker, attribute)]
    if missing:
        raise ConfigurationError(
            f"log_with={tracker!r} is no tracker: it lacks {', '.join(missing)}. Pass an object with these, or the name of one that is "
            f"installed ({', '.join(TRACKERS.names()) or 'none is'})."
        )
    if tracker.requires_logging_directory and logging_dir is None:
        raise ConfigurationError(
            f"the tracker {tracker.name!r} needs a folder for its logs. Pass project_dir=... or ProjectConfiguration(logging_dir=...)."
        )


class Tracking:
    """The Accelerator's methods for trackers."""

    project_configuration: ProjectConfiguration
    process_state: PartialState
    log_with: list[Any]
    trackers: list[Any]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Start a run in every tracker.

        Args:
            project_name: name of the project or experiment.
            config: hyperparameters to keep with the run.
            init_kwargs: further arguments for a tracker's constructor, by the tracker's name.
        """
        self.trackers = []
        for tracker in self.log_with:
            if not (self.process_state.is_main_process or not getattr(tracker, "main_process_only", True)):
                continue
            started = self._construct(tracker, project_name, dict((init_kwargs or {}).get(tracker.name, {})))
            getattr(started, "start", do_nothing)()
            if config is not None:
                started.store_init_configuration(dict(config))
            self.trackers.append(started)

    def _construct(self, tracker: Any, project_name: str, arguments: dict[str, Any]) -> Any:
        if not isinstance(tracker, type):
            return tracker
        if tracker.requires_logging_directory:  # type: ignore[attr-defined]
            arguments.setdefault("logging_dir", self.project_configuration.logging_dir)
        return tracker(project_name, **arguments)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Log values to every tracker.

        Args:
            values: names to numbers, texts or what else the trackers take.
            step: the step they belong to.
            log_kwargs: further arguments for a tracker's ``log``, by the tracker's name.
        """
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; on processes that do not log, an object whose methods do nothing.

        Args:
            name: the tracker's name.
            unwrap: return the object of the tracker's own library.

        Raises:
            ConfigurationError: no tracker of that name was started.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if any(tracker.name == name for tracker in self.log_with) and not self.process_state.is_main_process:
            return Silence()
        started = ", ".join(tracker.name for tracker in self.trackers) or "none"
        raise ConfigurationError(f"no tracker {name!r} was started; started: {started}. Name it in log_with and call init_trackers first.")

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            getattr(tracker, "finish", do_nothing)()
        self.trackers = []
