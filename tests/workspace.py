"""The packages and their files, for the tests across packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def projects() -> list[Path]:
    """The directory of every distribution."""
    return sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))


def environment() -> dict[str, str]:
    """Variables with which a new interpreter finds the sources of every distribution, installed or not."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(project / "src") for project in projects())}


def metadata(project: Path) -> dict[str, Any]:
    """The [project] table."""
    return tomllib.loads(project.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]


def import_name(project: Path) -> str:
    return project.name.replace("-", "_")


def sources(project: Path) -> list[Path]:
    """Every module of a distribution."""
    return sorted(project.joinpath("src").rglob("*.py"))


def module_name(project: Path, file: Path) -> str:
    """The dotted name of a module: ``accel_state.devices`` for .../src/accel_state/devices/__init__.py."""
    parts = file.relative_to(project / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
