"""Scripts in the processes that ``accel launch`` plans, forked from a server that has imported their libraries.

A start costs a tenth of the launcher's, which begins a new interpreter for itself and for each rank. For tests of what
a script computes; the launcher has tests of its own, and starts some of the examples too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_launch.cli import main as accel
from accel_state.testing import run_world

# Variables that a launcher or a shell has set must not affect a script.
_HIDDEN = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
# What run_world tells a rank.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_A_RANK += ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")


def run_launched(
    script: Path, *words: object, launch: tuple[object, ...] = ("--cpu",), folder: Path, seconds: float = 300
) -> list[str]:
    """The lines that a script prints under ``accel launch``, rank by rank.

    Args:
        script: the file.
        *words: its arguments.
        launch: options of ``accel launch``; the processes must all be on this machine.
        folder: working directory of the launcher and the processes.
        seconds: limit of the run.
    """
    arguments = tuple(map(str, words))
    start = _planned(["launch", "--dry_run", "--json", "-q", *map(str, launch), str(script), *arguments], folder)
    assert start["command"][-1 - len(arguments) :] == [str(script), *arguments], start["command"]
    hidden = {name: None for name in os.environ if name.startswith(_HIDDEN)}
    # run_world gives each rank its variables, as the launcher's plan does.
    texts = run_world(
        _run_script,
        len(start["ranks"]),
        *(str(script), arguments, str(folder)),
        env={**hidden, **start["environment"]},
        state=False,
        timeout=seconds,
    )
    return [line for text in texts for line in text.splitlines()]


def run_alone(script: Path, *words: object, folder: Path, seconds: float = 300, **variables: str) -> str:
    """What ``python script`` prints, without a launcher."""
    arguments = tuple(map(str, words))
    printed: str = call_alone(_run_script, str(script), arguments, str(folder), seconds=seconds, **variables)
    return printed


def call_alone(function: Callable[..., Any], *arguments: Any, seconds: float = 300, **variables: str) -> Any:
    """What a function of a module returns in a process that is no rank; if it raises, there is a ``WorldError``."""
    hidden = dict.fromkeys((*_OF_A_RANK, *(name for name in os.environ if name.startswith(_HIDDEN))))
    (result,) = run_world(function, 1, *arguments, env={**hidden, **variables}, state=False, timeout=seconds)
    return result


def _planned(words: list[str], folder: Path) -> dict[str, Any]:
    """What the launcher would start on this machine."""
    printed, here = io.StringIO(), Path.cwd()
    os.chdir(folder)  # configuration files may name others by relative paths
    try:
        with contextlib.redirect_stdout(printed):
            code = accel(words)
    finally:
        os.chdir(here)
    assert code == 0, printed.getvalue()
    (start,) = json.loads(printed.getvalue())
    return start


def _run_script(script: str, arguments: tuple[str, ...], folder: str) -> str:
    """Run a file as ``python file`` does, in this process, and return what it prints."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
