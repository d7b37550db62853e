"""Resolution of the ``log_with`` argument to tracker classes and objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from accel_state.errors import ConfigurationError, MissingDependencyError

from .base import REQUIRED, GeneralTracker
from .enums import LoggerType
from .trackers.registry import TRACKERS

logger: Final = logging.getLogger(__name__)

_METHODS = ("store_init_configuration", "log")
_registered: dict[str, type[GeneralTracker]] = {}


class _TrackerClasses(Mapping[str, type[GeneralTracker]]):
    """The tracker classes by name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        if name not in _names():
            raise KeyError(name)
        tracker: type[GeneralTracker] = _class_of(str(name))
        return tracker

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


LOGGER_TYPE_TO_CLASS: Mapping[str, type[GeneralTracker]] = _TrackerClasses()
"""Every tracker class by its name, including registered ones."""


def _names() -> list[str]:
    return list(dict.fromkeys([*TRACKERS.names(), *_registered]))


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a custom tracker class, so that ``log_with`` accepts its ``name`` and "all" includes it.

    A class of the same name is replaced, with a warning: a notebook's cell may run twice.

    A package registers its classes for everyone who installs it with the entry point group ``accel.trackers`` instead.

    Args:
        tracker_class: a subclass of GeneralTracker.

    Raises:
        ConfigurationError: it is not a tracker class, or is named "all".
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(
            f"{tracker_class!r} is not a subclass of GeneralTracker. Derive it from accel_track.GeneralTracker."
        )
    _check(tracker_class, None, check_directory=False)
    name = str(tracker_class.name)
    if name == LoggerType.ALL.value:
        raise ConfigurationError(
            f"the name of {tracker_class.__qualname__} is 'all', which selects every tracker. Choose another name."
        )
    if name in _names() and _registered.get(name) is not tracker_class:
        logger.warning("The tracker %r is replaced by %s.", name, tracker_class.__qualname__)
    _registered[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Return the names of all trackers whose libraries are installed."""
    return [name for name in _names() if _is_available(name)]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the tracker classes and objects that ``log_with`` selects, without duplicates.

    A tracker object replaces the class of the same name.

    Args:
        log_with: a name, a LoggerType, a tracker class or object, "all" for every installed tracker (without
            ``logging_dir`` those that need none, with a warning), or a list of these.
        logging_dir: directory for logs.

    Returns:
        Classes selected by name, in order, followed by the classes and objects that were passed.

    Raises:
        ConfigurationError: an unknown name, an object that is not a tracker, or a tracker that needs ``logging_dir``.
        MissingDependencyError: the library of a tracker selected by name is not installed.
    """
    if log_with is None:
        return []
    items = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    trackers = [item for item in items if not isinstance(item, str)]
    names = list(dict.fromkeys(str(item) for item in items if isinstance(item, str)))
    if LoggerType.ALL.value in names:
        names.remove(LoggerType.ALL.value)
        names = list(dict.fromkeys([*names, *_startable(logging_dir)]))
    given = {getattr(tracker, "name", None) for tracker in trackers}
    selected = [*(_load(name) for name in names if name not in given), *trackers]
    for tracker in selected:
        _check(tracker, logging_dir)
    return selected


def _startable(logging_dir: Any) -> list[str]:
    """Return the installed trackers, without a directory those that need none; the others are named in a warning."""
    available = get_available_trackers()
    if logging_dir is not None:
        return available
    without = [name for name in available if getattr(_class_of(name), "requires_logging_directory", False)]
    if without:
        logger.warning(
            "log_with='all' leaves out %s: they need a logging directory. Pass project_dir=... to the Accelerator, or "
            "logging_dir=... to TrackerRun.",
            ", ".join(without),
        )
    return [name for name in available if name not in without]


def _is_available(name: str) -> bool:
    try:
        return _class_of(name).is_available()
    except Exception as error:
        # A broken third-party package must not disable all trackers.
        logger.warning("The tracker %r cannot be loaded and is skipped: %s: %s", name, type(error).__name__, error)
        return False


def _class_of(name: str) -> Any:
    return _registered[name] if name in _registered else TRACKERS.load(name)


def _load(name: str) -> Any:
    """Return the class of a tracker.

    Raises MissingDependencyError with the pip command if its library is not installed.
    """
    tracker = _class_of(name)
    if not getattr(tracker, "is_available", lambda: True)():
        raise MissingDependencyError(
            f"the tracker {name!r} needs a library that is not installed. Install it with: pip install "
            f"'accel-track[{name}]'. Installed trackers: {', '.join(get_available_trackers())}."
        )
    return tracker


def _check(tracker: Any, logging_dir: Any, check_directory: bool = True) -> None:
    is_class = isinstance(tracker, type)
    needed = REQUIRED if isinstance(tracker, GeneralTracker) else (*REQUIRED, *_METHODS)
    # Looked up in the class, because a property may need what start() has not set yet.
    missing = [name for name in needed if not hasattr(tracker if is_class else type(tracker), name)]
    missing = [name for name in missing if is_class or name not in getattr(tracker, "__dict__", {})]
    if missing:
        raise ConfigurationError(
            f"log_with={tracker!r} is not a tracker: it lacks {', '.join(missing)}. Pass an object with these, or the "
            f"name of an installed tracker ({', '.join(get_available_trackers())})."
        )
    if check_directory and is_class and tracker.requires_logging_directory and logging_dir is None:
        raise ConfigurationError(
            f"the tracker {tracker.name!r} needs a logging directory. Pass project_dir=... or "
            "ProjectConfiguration(logging_dir=...) to the Accelerator, or logging_dir=... to TrackerRun."
        )
