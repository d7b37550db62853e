"""A watch over the loops of prepared loaders: something that is to happen between two steps, whatever loop is running.

There is one at most in a process, because it acts on the process: :mod:`accel` saves the training when the process is
told to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .loader import PreparedLoader


class LoopWatch(Protocol):
    """What a watch offers. Every rank calls it at the same points of the program."""

    signals: tuple[int, ...]
    """Signals that are for the process that trains: workers ignore them."""

    def begin(self, loader: PreparedLoader) -> None:
        """A loop over a loader is about to begin."""
        ...

    def step(self, loader: PreparedLoader) -> None:
        """The loop has worked on a batch and asks for the next one. Not called for loops whose ranks may have different
        steps.
        """
        ...


_current: LoopWatch | None = None


def current() -> LoopWatch | None:
    """The watch that is set."""
    return _current


def set_current(watch: LoopWatch | None) -> None:
    """Set the watch of this process, or none. Loops that are running keep theirs."""
    global _current
    _current = watch


def signals() -> tuple[int, ...]:
    """Signals that workers ignore."""
    return () if _current is None else _current.signals
