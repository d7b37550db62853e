"""Errors of the launching functions and of the command line. Torch-free."""

from __future__ import annotations

import sys

from accel_state.errors import AccelError

USAGE_ERROR = 2


class LaunchError(AccelError, RuntimeError):
    """A launched function failed in one of its processes; the message ends with that process's traceback."""


def fail(program: str, message: str) -> int:
    """Print one line to stderr, and return the exit code of a usage error."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR
