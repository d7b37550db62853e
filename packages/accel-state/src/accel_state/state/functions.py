"""Functions on the shared state."""

from __future__ import annotations

from .partial import PartialState


def wait_for_everyone() -> None:
    """Wait until every process has reached this call; returns at once in a single process."""
    PartialState().wait_for_everyone()
