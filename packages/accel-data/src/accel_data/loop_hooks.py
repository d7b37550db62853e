"""A process-wide hook that runs between two steps of any prepared loader.

A process has at most one hook. :mod:`accel` uses it to save a checkpoint when the process must stop.
"""

from __future__ import annotations

from typing import Any, Protocol


class LoopHook(Protocol):
    """Callbacks from loops over prepared loaders. Every rank makes the same calls at the same points."""

    signals: tuple[int, ...]
    """Signals handled by the training process, which worker processes ignore."""

    def begin(self, loader: Any) -> None:
        """Run before a loop over a PreparedLoader begins."""
        ...

    def step(self, loader: Any) -> None:
        """Run when the loop requests the next batch, unless ranks may have different numbers of steps."""
        ...


_current: LoopHook | None = None


def current() -> LoopHook | None:
    """Return the hook of this process, or None."""
    return _current


def set_current(hook: LoopHook | None) -> None:
    """Set or remove the hook of this process. Loops that are already running keep theirs."""
    global _current
    _current = hook


def signals() -> tuple[int, ...]:
    """Signals that worker processes ignore."""
    return () if _current is None else _current.signals
