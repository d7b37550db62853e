"""The base class of handlers, and how an Accelerator looks them up."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from accel_state.arguments import check_flags
from accel_state.errors import ArgumentTypeError, ConfigurationError, check_type

H = TypeVar("H", bound="KwargsHandler")


@dataclass
class KwargsHandler:
    """Base class of the settings that an Accelerator takes in ``kwargs_handlers``."""

    def __post_init__(self) -> None:
        check_flags(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, as a deep copy."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        default = type(self)()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}


class HandlerTypeError(ArgumentTypeError, AssertionError):
    """An element of ``kwargs_handlers`` that is not a KwargsHandler."""


class Handlers:
    """The handlers of one Accelerator, at most one of each type."""

    def __init__(self, handlers: Iterable[Any] | None = None) -> None:
        self._by_type: dict[type, Any] = {}
        if handlers is not None:
            check_type(handlers, (list, tuple), "kwargs_handlers", "Pass a list: kwargs_handlers=[...].")
        for handler in handlers or ():
            if not isinstance(handler, KwargsHandler):
                raise HandlerTypeError(
                    f"kwargs_handlers got {handler!r}, a {type(handler).__name__}, which is not a KwargsHandler. Pass "
                    "instances of AutocastKwargs, DistributedDataParallelKwargs, FP8RecipeKwargs, GradScalerKwargs, "
                    "InitProcessGroupKwargs, ProfileKwargs or another class derived from KwargsHandler."
                )
            if type(handler) in self._by_type:
                raise ConfigurationError(
                    f"kwargs_handlers holds two {type(handler).__name__}. Pass one with all settings."
                )
            self._by_type[type(handler)] = handler

    def add(self, handler: KwargsHandler) -> None:
        """Add one that the launcher asks for; one of its type that the script passes takes precedence."""
        self._by_type.setdefault(type(handler), handler)

    def get(self, kind: type[H]) -> H:
        """Return the handler of a type (or of one derived from it), or one with default settings."""
        for handler in self._by_type.values():
            if isinstance(handler, kind):
                return handler
        return kind()

    def all(self, kind: type[H]) -> list[H]:
        return [handler for handler in self._by_type.values() if isinstance(handler, kind)]
