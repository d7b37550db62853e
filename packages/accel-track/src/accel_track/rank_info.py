"""The rank of this process, without initialising anything: scripts without a PartialState can log too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from accel_state.state import PartialState, current_rank, is_initialized

F = TypeVar("F", bound=Callable[..., Any])


def rank() -> int:
    """Return the rank according to the PartialState, torch's process group, or the launcher's environment."""
    return current_rank()[0]


def is_main_process() -> bool:
    """Return True if this is rank 0, and no other replica of a fault-tolerant run logs."""
    return PartialState().is_main_process if is_initialized() else rank() == 0


def on_main_process(function: F) -> F:
    """Decorate a tracker's method to run on rank 0 only and return None elsewhere.

    It runs on every rank if the tracker's class has ``main_process_only = False``.
    """

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not is_main_process():
            return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]
