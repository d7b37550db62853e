"""Registries of variants: a name, and where its code lives. Nothing is imported until somebody asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from .errors import ConfigurationError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named variants of one concept (devices, strategies, commands, ...).

    Args:
        kind: what is registered, in the singular, for error messages ("strategy").
        builtin: name to ``"module:attribute"``.
        entry_point_group: group under which other distributions add their own ("accel.strategies").
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], entry_point_group: str | None = None) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._targets: dict[str, str] = {}
        self._searched_entry_points = False
        for name, target in builtin.items():
            self.register(name, target)

    def register(self, name: str, target: str) -> None:
        """Add a variant.

        Raises:
            ConfigurationError: the name is taken by another target; both are named.
        """
        known = self._targets.get(name)
        if known is not None and known != target:
            raise ConfigurationError(
                f"the {self.kind} {name!r} is registered twice: as {known} and as {target}. Rename one of them."
            )
        self._targets[name] = target

    def names(self) -> list[str]:
        """Every registered name, built-in ones first, in the order of registration."""
        self._search_entry_points()
        return list(self._targets)

    def __contains__(self, name: object) -> bool:
        if name in self._targets:
            return True
        self._search_entry_points()
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def target(self, name: str) -> str:
        """The ``"module:attribute"`` of a name, without importing it.

        Raises:
            ConfigurationError: no such name; the message lists the known ones.
        """
        if name not in self:
            raise ConfigurationError(
                f"{name!r} is not a known {self.kind}. Known: {', '.join(self.names()) or 'none'}."
                + (
                    f" A package adds its own through the entry point group {self.entry_point_group!r}."
                    if self.entry_point_group
                    else ""
                )
            )
        return self._targets[name]

    def load(self, name: str) -> T:
        """Import and return what is registered under ``name``.

        Raises:
            ConfigurationError: no such name.
        """
        module, _, attribute = self.target(name).partition(":")
        value: Any = getattr(importlib.import_module(module), attribute)
        return value

    def _search_entry_points(self) -> None:
        # Reading the metadata of every installed distribution costs milliseconds, so only when a built-in did not
        # match.
        if self._searched_entry_points or self.entry_point_group is None:
            return
        self._searched_entry_points = True
        # Importing it takes longer than all the rest of a command line.
        from importlib.metadata import entry_points

        for entry in entry_points(group=self.entry_point_group):
            self.register(entry.name, entry.value)
