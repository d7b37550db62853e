"""The attributes that all instances of a state class share.

They live in a :class:`Context`, so that a test (or a notebook cell) can have fresh ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar


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


def is_initialized() -> bool:
    """Return True if a PartialState or an Accelerator has been created in this process; imports neither."""
    return bool(_current.process)


class _SharedStateType(type):
    """Adds `_shared_state` to each class, which libraries read to see whether a state exists without creating one."""

    @property
    def _shared_state(cls) -> dict[str, Any]:
        shared: dict[str, Any] = getattr(_current, cls._slot)  # type: ignore[attr-defined]
        return shared

    @_shared_state.setter
    def _shared_state(cls, attributes: dict[str, Any]) -> None:
        # Scripts set it to {} to start over; instances that exist keep what they have.
        setattr(_current, cls._slot, attributes)  # type: ignore[attr-defined]


class SharedState(metaclass=_SharedStateType):
    """Attributes are stored in the current :class:`Context`, not in the instance."""

    _slot: ClassVar[str]

    def __init__(self) -> None:
        self.__dict__ = getattr(_current, self._slot)

    if not TYPE_CHECKING:  # so that type checkers find names that do not exist

        def __getattr__(self, name: str) -> Any:
            if self.__dict__ or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}: it was reset (_reset_state) and not initialized "
                f"again. Create a new Accelerator or {type(self).__name__}."
            )

    @property
    def initialized(self) -> bool:
        """True if the shared attributes have been set."""
        return bool(self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = self._picklable()
        return (_join, (type(self), attributes)) if attributes else (type(self), ())

    def _picklable(self) -> dict[str, Any]:
        """Attributes to restore where a pickle is loaded, in a process that has none of its own."""
        return {}

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the attributes; the next instance initializes them again."""
        getattr(_current, cls._slot).clear()


def _join(cls: type[SharedState], attributes: dict[str, Any]) -> SharedState:
    """Load a pickled state: rank, device and gradient state are those of the process that loads it."""
    exists = bool(cls._shared_state)
    state = cls()
    if not exists:
        state.__dict__.update(attributes)
    return state
