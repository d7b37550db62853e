"""How many files and functions a reader crosses to follow a save or a load; docs/architecture.md has the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# operation -> (files, functions)
LIMITS = {"training step": (11, 25), "save_state": (20, 75), "load_state": (18, 90)}


def test_reading_paths_stay_short() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "reading_path.py")]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    counted = {row[0]: (int(row[1]), int(row[2])) for row in rows if row[0] in LIMITS}
    assert set(counted) == set(LIMITS)
    for operation, (files, functions) in counted.items():
        assert (files, functions) <= LIMITS[operation] and functions <= LIMITS[operation][1], (
            f"{operation} crosses {files} files and {functions} functions; see {command[1]} --list"
        )
