"""The Python that runs the scripts: the one that runs the launcher, with the same options."""

from __future__ import annotations

import subprocess
import sys


def python_command() -> list[str]:
    """This interpreter with its options (``python -O -m accel_launch``), and with output that is not held back.

    Through a pipe, Python would otherwise hand over what a script prints in blocks of 8 kB, long after the fact.
    """
    # What multiprocessing itself uses to start an interpreter like this one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-u"]
