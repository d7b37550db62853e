"""The Python that runs the scripts: the one that runs the launcher, with the same options."""

from __future__ import annotations

import subprocess
import sys


def python_command(*options: str) -> list[str]:
    """This interpreter with its options (``python -O -m accel_launch``), and further ones."""
    # What multiprocessing itself uses to start an interpreter like this one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *options]
