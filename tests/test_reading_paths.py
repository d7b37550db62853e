"""How many files and functions a reader crosses to follow an operation; docs/architecture.md has the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# operation -> (files, functions, calls)
LIMITS = {
    "training step": (11, 25, 25),
    "save_state": (20, 75, 500),
    "load_state": (18, 90, 300),
    "launch of 2 processes": (46, 238, 1200),
}


def test_reading_paths_stay_short() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "reading_path.py")]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    counted = {row[0]: [int(cell) for cell in row[1:]] for row in rows if row[0] in LIMITS}
    assert set(counted) == set(LIMITS)
    for operation, numbers in counted.items():
        assert all(number <= most for number, most in zip(numbers, LIMITS[operation], strict=True)), (
            f"{operation} crosses {numbers[0]} files and {numbers[1]} functions in {numbers[2]} calls, of at most "
            f"{LIMITS[operation]}; see {command[1]} --list"
        )
