"""The attributes that all instances of a state class share.

They live in a :class:`Context`, so that a test (or a notebook cell) can have fresh ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class ThreadLocalSharedDict:
    """A descriptor over one dictionary that all instances of a class share, per thread or for all threads."""

    def __init__(self, thread_local: bool = False) -> None:
        self._holder: Any = threading.local() if thread_local else SimpleNamespace()

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        shared: dict[str, Any] = self._holder.__dict__.setdefault("shared", {})
        return shared

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._holder.__dict__["shared"] = value


@dataclass
class Context:
    """The shared attributes of the three state classes."""

    process: dict[str, Any] = field(default_factory=dict)
    accelerator: dict[str, Any] = field(default_factory=dict)
    gradient: dict[str, Any] = field(default_factory=dict)


_current = Context()


def current() -> Context:
    """Return the current context. All threads share it: data loaders and autograd run in threads of their own."""
    return _current


@contextmanager
def isolated() -> Iterator[Context]:
    """Run a block with fresh shared states, and restore the outer ones afterwards.

    The process group is not part of the context: a block that creates one must destroy it.
    """
    global _current
    outer = _current
    _current = Context()
    try:
        yield _current
    finally:
        _current = outer
