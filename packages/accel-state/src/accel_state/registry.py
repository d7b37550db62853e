"""Registries of variants: names, and where their code lives. A variant is imported when it is first used."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import ConfigurationError
from .humanize import closest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

T = TypeVar("T")


class Registry(Generic[T]):
    """Named variants of one concept (devices, strategies, commands, ...).

    Args:
        kind: the concept in the singular, for error messages ("strategy").
        builtin: name to ``"module:attribute"``.
        entry_point_group: group in which other distributions add variants ("accel.strategies").
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], entry_point_group: str | None = None) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._targets: dict[str, str] = dict(builtin)
        self._searched_entry_points = False

    def register(self, name: str, target: str) -> None:
        """Add a variant; the name must not be registered with another target."""
        existing = self._targets.setdefault(name, target)
        if existing != target:
            raise ConfigurationError(
                f"the {self.kind} {name!r} is registered twice: as {existing} and as {target}. Rename one of them."
            )

    def names(self) -> list[str]:
        """Return every registered name, in the order of registration, built-in ones first."""
        # Reading the metadata of every installed distribution takes milliseconds, so only if no built-in name matches.
        if self.entry_point_group is not None and not self._searched_entry_points:
            for entry in installed_entry_points(self.entry_point_group):
                self.register(entry.name, entry.value.partition("[")[0].strip())
            self._searched_entry_points = True
        return list(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def target(self, name: str) -> str:
        """Return the ``"module:attribute"`` of a name, without importing it."""
        if name not in self._targets and name not in self.names():
            hint = ""
            if self.entry_point_group:
                hint = f" A package can add its own with an entry point in the group {self.entry_point_group!r}."
            raise ConfigurationError(
                f"{name!r} is not a known {self.kind}.{closest(name, self.names())} Known: "
                f"{', '.join(self.names()) or 'none'}.{hint}"
            )
        return self._targets[name]

    def load(self, name: str) -> T:
        """Import and return the variant of a name."""
        target = self.target(name)
        module_name, _, path = target.partition(":")
        value: Any = importlib.import_module(module_name)
        for attribute in filter(None, path.split(".")):
            if not hasattr(value, attribute):
                raise ConfigurationError(
                    f"the {self.kind} {name!r} is registered as {target}, but {module_name} has no {path}. Correct the "
                    "registration, or upgrade the package that made it."
                )
            value = getattr(value, attribute)
        return value


def installed_entry_points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of a group that installed distributions declare.

    The metadata of all distributions is read once for all groups, since that takes 10 ms or more, and again when
    ``sys.path`` has changed.
    """
    return _read_entry_points(tuple(sys.path)).select(group=group)


@functools.lru_cache(maxsize=1)
def _read_entry_points(_paths: tuple[str, ...]) -> EntryPoints:
    # Imported here, because it takes longer than the rest of a command line.
    from importlib.metadata import entry_points

    found: Any = entry_points()  # before Python 3.12 of another class, which selects in the same way
    return found
