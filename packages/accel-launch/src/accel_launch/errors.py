"""Errors of the launching functions."""

from __future__ import annotations

from accel_state.errors import AccelError


class LaunchError(AccelError, RuntimeError):
    """A launched function failed in one of its processes; the message ends with that process's traceback."""
