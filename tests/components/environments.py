"""Environments of their own for what does not belong beside everything else; scripts/components makes them."""

from __future__ import annotations

import os
from pathlib import Path

from workspace import ROOT


def find(name: str) -> Path:
    """The interpreter of an environment, whether or not it exists; ACCEL_<NAME>_PYTHON names another one."""
    return Path(os.environ.get(f"ACCEL_{name.upper()}_PYTHON", ROOT / f".venv-{name}" / "bin" / "python"))


def missing(name: str) -> str:
    """Why an environment cannot be used; empty where it can."""
    python = find(name)
    if not python.is_file():
        return f"there is no .venv-{name}: scripts/components {name}"
    # Written last: what goes before may have been broken off, by the network or by a time limit.
    is_whole = f"ACCEL_{name.upper()}_PYTHON" in os.environ or python.parents[1].joinpath("installed").is_file()
    return "" if is_whole else f"the packages of .venv-{name} are not installed: scripts/components {name}"
