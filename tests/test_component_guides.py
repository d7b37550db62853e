"""The guide of a component shows its names where a user who installed that component alone finds them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from workspace import ROOT

GUIDES = {
    "guides/distributed-inference.md": "accel_state",
    "guides/fp8.md": "accel_fp8",
    "guides/inference.md": "accel_bigmodel",
    "guides/launching.md": "accel_launch",
    "guides/memory-estimator.md": "accel_bigmodel",
    "guides/monitoring.md": "accel_monitor",
    "guides/pipelined-inference.md": "accel_bigmodel",
    "guides/planning.md": "accel_plan",
    "guides/quantization.md": "accel_quant",
    "guides/tracking.md": "accel_track",
    "tutorials/big-models.md": "accel_bigmodel",
    "extending.md": "accel_track",
}


def _exports(module: str) -> set[str]:
    files = (ROOT / "tests" / "facts" / "exports").glob(f"{module}*.txt")
    return {line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()}


def _imports_from_accel(page: Path) -> list[str]:
    """The names that the Python blocks of a page import from ``accel`` and its modules."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accel":
                found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_imports_from_its_component(page: str) -> None:
    elsewhere = set(_imports_from_accel(ROOT / "docs" / page)) & _exports(GUIDES[page])
    assert not elsewhere, f"docs/{page}: import these from {GUIDES[page]}: {sorted(elsewhere)}"


def test_the_names_of_a_component_are_known() -> None:
    assert "prepare_pippy" in _exports("accel_bigmodel") and "GeneralTracker" in _exports("accel_track")
