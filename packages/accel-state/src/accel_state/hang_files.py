"""The file in which a rank leaves a hang report for its launcher, next to its error file. Torch-free."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .env import read_str
from .preemption import launcher_directory

FILE_NAME = "hang.json"

PRINTER_VARIABLE = "ACCEL_LAUNCH_PRINTS_HANGS"
"""The error file of a rank whose launcher prints the reports; other ranks print them."""


def path() -> Path | None:
    """Return the file of this rank; None if its launcher reads none."""
    directory, printer = launcher_directory(), read_str(PRINTER_VARIABLE)
    # A launcher that the script starts inherits the variable.
    return directory / FILE_NAME if directory is not None and printer == read_str("TORCHELASTIC_ERROR_FILE") else None


def write(file: Path, text: str, *, printed: bool) -> None:
    """Write a report.

    Args:
        file: of this rank.
        text: the report.
        printed: whether the launcher of another rank prints it.
    """
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"text": text, "printed": printed}), encoding="utf-8")
    os.replace(temporary, file)


def read(directory: Path) -> tuple[str, bool] | None:
    """Read the report in the directory of a rank: its text, and whether the launcher of another rank prints it."""
    try:
        content = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(content["text"]), bool(content["printed"])
