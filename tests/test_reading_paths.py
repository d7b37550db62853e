"""How many files and functions a reader crosses to follow an operation; docs/architecture.md has the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# operation -> (files, functions, calls); the number of calls of a save and a load depends on its threads
LIMITS = {
    "training step": (11, 25, 25),
    "Accelerator()": (20, 59, 105),
    "prepare": (19, 60, 95),
    "save_state": (17, 62, 140),
    "load_state": (16, 55, 135),
    "launch of 2 processes": (30, 148, 900),
}


def test_reading_paths_stay_short() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "reading_path.py")]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    counted = {row[0]: tuple(map(int, row[1:])) for row in rows if row[0] in LIMITS}
    assert set(counted) == set(LIMITS)
    for operation, limits in LIMITS.items():
        for what, number, limit in zip(("files", "functions", "calls"), counted[operation], limits, strict=True):
            assert limit is None or number <= limit, (
                f"{operation}: {number} {what}, at most {limit}; see {command[1]} --list {operation!r}"
            )


def test_the_page_has_these_numbers_and_stays_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 120
    assert len(re.findall(r"(?<!\*)\*\w[\w ]*\*(?!\*)", page.partition("## Glossary")[2])) <= 60, "terms"
    rows = dict(re.findall(r"^\| `?([^|`]+)`? \|(?:[^|]*\|){2}([^|]*\|[^|]*)\|$", page, re.MULTILINE))
    for operation in ("training step", "Accelerator()", "prepare", "save_state", "load_state"):
        assert tuple(map(int, rows[operation].split("|"))) == LIMITS[operation][:2], operation
