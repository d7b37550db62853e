"""The command that starts this Python again."""

from __future__ import annotations

import subprocess
import sys


def python_command(*options: str) -> list[str]:
    """Return this interpreter with the options it was started with (``python -O``), then ``options``."""
    # The function that multiprocessing uses for its interpreters.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *options]
