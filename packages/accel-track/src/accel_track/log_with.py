"""What ``log_with`` asks for."""

from __future__ import annotations

import logging
import os
from typing import Any

from accel_state.errors import ConfigurationError, MissingDependencyError

from .base import REQUIRED, GeneralTracker
from .enums import LoggerType
from .trackers.registry import TRACKERS

logger = logging.getLogger(__name__)

_METHODS = ("store_init_configuration", "log")
_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker class of your own known by its ``name``, for ``log_with``; also "all" then takes it.

    A package registers its classes for everybody who installs it through the entry point group
    ``accel.trackers`` instead.

    Args:
        tracker_class: a subclass of GeneralTracker.

    Raises:
        ConfigurationError: it is no tracker class, or its name is taken.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(
            f"{tracker_class!r} is no subclass of GeneralTracker. Derive it from accel_track.GeneralTracker."
        )
    _check(tracker_class, None, needs_folder=False)
    name = str(tracker_class.name)
    known = _registered.get(name)
    if name in TRACKERS or name == "all" or known not in (None, tracker_class):
        raise ConfigurationError(
            f"the name {name!r} of {tracker_class.__qualname__} is taken by another tracker. Choose another name."
        )
    _registered[name] = tracker_class


def get_available_trackers() -> list[str]:
    """The names of all trackers whose libraries are installed."""
    return [name for name in _names() if _is_available(name)]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """The tracker classes and objects that ``log_with`` asks for, each once.

    An object stands for its name: it wins over the class of that name.

    Args:
        log_with: a name, a LoggerType, a tracker class or object, "all" for every tracker that is installed, or a list
            of those.
        logging_dir: the folder for logs.

    Returns:
        Classes, in the order they were asked for, and objects.

    Raises:
        ConfigurationError: a name that is not known, an object that is no tracker, or a tracker that needs
            ``logging_dir``.
        MissingDependencyError: the library of a tracker that was named is not installed.
    """
    asked = list(log_with) if isinstance(log_with, (list, tuple, set)) else [] if log_with is None else [log_with]
    names = [str(item) for item in asked if isinstance(item, str)]
    chosen = [item for item in asked if not isinstance(item, str)]
    taken = {getattr(item, "name", None) for item in chosen}
    wanted = list(dict.fromkeys(name for name in names if name != LoggerType.ALL))
    if LoggerType.ALL.value in names:
        wanted += [name for name in get_available_trackers() if name not in wanted]
    classes = [_load(name) for name in wanted if name not in taken]
    for tracker in [*classes, *chosen]:
        _check(tracker, logging_dir)
    return [*classes, *chosen]


def _names() -> list[str]:
    return [*TRACKERS.names(), *_registered]


def _is_available(name: str) -> bool:
    try:
        return _class_of(name).is_available()
    except Exception as error:
        # One broken package of somebody else must not take the others with it.
        logger.warning("The tracker %r cannot be loaded and is left out: %s: %s", name, type(error).__name__, error)
        return False


def _class_of(name: str) -> Any:
    return _registered[name] if name in _registered else TRACKERS.load(name)


def _load(name: str) -> Any:
    """Raise MissingDependencyError, which names the pip command, if the library of a tracker is not installed."""
    tracker = _class_of(name)
    if not getattr(tracker, "is_available", lambda: True)():
        raise MissingDependencyError(
            f"the tracker {name!r} needs a library that is not installed. Install it with: pip install "
            f"'accel-track[{name}]'. Installed "
            f"trackers: {', '.join(get_available_trackers())}."
        )
    return tracker


def _check(tracker: Any, logging_dir: Any, needs_folder: bool = True) -> None:
    needed = REQUIRED if isinstance(tracker, GeneralTracker) else (*REQUIRED, *_METHODS)
    # Looked for in the class: a property may need what start() has yet to set.
    missing = [name for name in needed if not hasattr(tracker if isinstance(tracker, type) else type(tracker), name)]
    missing = [name for name in missing if isinstance(tracker, type) or name not in getattr(tracker, "__dict__", {})]
    if missing:
        raise ConfigurationError(
            f"log_with={tracker!r} is no tracker: it lacks {', '.join(missing)}. Pass an object with these, or the "
            "name of one that is "
            f"installed ({', '.join(get_available_trackers())})."
        )
    if needs_folder and isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"the tracker {tracker.name!r} needs a folder for its logs. "  # type: ignore[attr-defined]
            "Pass project_dir=... or ProjectConfiguration(logging_dir=...) to the Accelerator, or logging_dir=... to "
            "Tracking."
        )
