"""Errors of the launching functions and of the command line, and suggestions for misspelt names. Torch-free."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Sequence

from accel_state.errors import AccelError
from accel_state.secrets import hide_in_text

from .torchrun_options import UNUSED

USAGE_ERROR = 2


class LaunchError(AccelError, RuntimeError):
    """A launched function failed in one of its processes; the message ends with that process's traceback."""


class ScriptFailedError(LaunchError, subprocess.CalledProcessError):
    """A script that :func:`~accel_launch.api.launch_command` started ended with another exit code than 0."""

    def __init__(self, returncode: int, cmd: str) -> None:
        subprocess.CalledProcessError.__init__(self, returncode, cmd)

    def __str__(self) -> str:
        return f"{hide_in_text(str(self.cmd))} failed with exit code {self.returncode}."


def fail(program: str, message: str) -> int:
    """Print one line to stderr, with secrets hidden, and return the exit code of a usage error."""
    print(f"{program}: error: {hide_in_text(' '.join(message.split()))}", file=sys.stderr)
    return USAGE_ERROR


# Options of other launchers, and what they are called here.
_ELSEWHERE = {
    "fp16": "--mixed_precision fp16",
    "bf16": "--mixed_precision bf16",
}


def suggest(name: str, known: Sequence[str]) -> str:
    """`` Did you mean X?`` with the closest known name, or an empty text."""
    if answer := UNUSED.get(name):
        return f" {answer}"
    elsewhere = _ELSEWHERE.get(name[2:].replace("-", "_")) if name.startswith("--") else None
    close = [elsewhere] if elsewhere else difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
