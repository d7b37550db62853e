"""docs/hardware.md names every call that only CUDA has, with a line that holds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
# Places: `package/file.py:line`.
PLACE = re.compile(r"`(accel\w*/[\w/]+\.py):(\d+)`")
# What accel calls of CUDA's own interfaces. A call in a string or a docstring is none.
CALL = re.compile(r"torch\.cuda\.\w+|torch\.backends\.cudnn|torch\._scaled_mm|which\(\"nvidia-smi\"\)")


def _rows() -> list[list[str]]:
    table = PAGE.split("## What only CUDA has", 1)[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] != "call" and not row[0].startswith("---")]


def _source(name: str) -> Path:
    (found,) = ROOT.glob(f"packages/*/src/{name}")
    return found


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0][:40])
def test_a_row_names_lines_with_its_call(row: list[str]) -> None:
    assert len(row) == 5 and all(row)
    words = re.findall(r"`([\w.-]+)`", row[0]) or ["\0"]
    for name, number in PLACE.findall(row[1]):
        lines = _source(name).read_text(encoding="utf-8").splitlines()
        line = lines[int(number) - 1]
        elsewhere = [index for index, text in enumerate(lines, 1) if any(word in text for word in words)]
        assert any(word in line for word in words), f"{name}:{number} holds none of {words}; lines that do: {elsewhere}"


def test_every_call_is_in_the_table() -> None:
    listed = {f"{name}:{number}" for row in _rows() for name, number in PLACE.findall(row[1])}
    assert len(listed) > 10
    found = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        if path.is_relative_to(ROOT / "packages" / "accel-megatron"):
            continue  # Megatron-core is written for CUDA as a whole
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = re.sub(r"\"\"\".*|\"A call such.*|#.*|``[^`]*``", "", line)
            if CALL.search(code):
                found.add(f"{path.as_posix().split('/src/', 1)[1]}:{number}")
    assert found - listed == set()
