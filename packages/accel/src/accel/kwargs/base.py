"""What all handlers have in common."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from accel_state.errors import ConfigurationError

H = TypeVar("H", bound="KwargsHandler")


@dataclass
class KwargsHandler:
    """Base of the settings that an Accelerator takes in `kwargs_handlers`."""

    def to_dict(self) -> dict[str, Any]:
        """All settings, as a deep copy."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        default = type(self)()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }


class Handlers:
    """The handlers of one Accelerator, found by their type.

    Args:
        handlers: at most one of each kind.

    Raises:
        ConfigurationError: something else than a handler, or two of one kind.
    """

    def __init__(self, handlers: Iterable[Any] | None = None) -> None:
        self._by_type: dict[type, Any] = {}
        for handler in handlers or ():
            if not isinstance(handler, KwargsHandler):
                raise ConfigurationError(
                    f"kwargs_handlers got {handler!r}, which is a {type(handler).__name__} and no KwargsHandler. "
                    "Allowed are "
                    "instances of AutocastKwargs, DistributedDataParallelKwargs, FP8RecipeKwargs, GradScalerKwargs, "
                    "InitProcessGroupKwargs, ProfileKwargs and others derived from KwargsHandler."
                )
            if type(handler) in self._by_type:
                raise ConfigurationError(
                    f"kwargs_handlers holds two {type(handler).__name__}. Pass one, with all settings."
                )
            self._by_type[type(handler)] = handler

    def get(self, kind: type[H]) -> H:
        """The handler of a kind (or of one derived from it), or one with default settings."""
        found = self._by_type.get(kind)
        if found is None:
            found = next((handler for handler in self._by_type.values() if isinstance(handler, kind)), None)
        return found if found is not None else kind()

    def all(self, kind: type[H]) -> list[H]:
        """The handlers of a kind and of those derived from it."""
        return [handler for handler in self._by_type.values() if isinstance(handler, kind)]
