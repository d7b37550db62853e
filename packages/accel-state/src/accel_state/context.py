"""What one process knows about its run, in one place.

`PartialState`, `AcceleratorState` and `GradientState` are views that share what they hold: every instance sees the same
attributes. Those attributes live in a :class:`Context`, so a test (or a notebook cell) can have a fresh one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class ThreadLocalSharedDict:
    """A descriptor over one dictionary that all instances of a class share.

    Args:
        thread_local: give each thread a dictionary of its own. Runtimes that drive several devices from the threads of
            one process (older XLA) need it; everywhere else the dictionary belongs to the process.
    """

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
    """The context in force in this process.

    It is one for all threads: batches are prepared and gradients reduced in threads that the user never started.
    """
    return _current


@contextmanager
def isolated() -> Iterator[Context]:
    """Run a block with fresh shared states, and give the outer ones back afterwards.

    A process group is not part of the context: the block either creates none, or destroys what it created.
    """
    global _current
    outer = _current
    _current = Context()
    try:
        yield _current
    finally:
        _current = outer
