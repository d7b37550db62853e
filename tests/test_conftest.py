"""Guarantees of the workspace's ``conftest.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def examples() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.integers(), st.text(max_size=20))
    def collect(number: int, text: str) -> None:
        found.append((number, text))

    collect()
    return found


def test_hypothesis_examples_do_not_depend_on_loaded_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = examples()
    source = tmp_path / "loaded_later.py"
    source.write_text(f"VALUES = {[*range(1000, 1400), *(f'text {number}' for number in range(400))]}\n")
    spec = importlib.util.spec_from_file_location("loaded_later", source)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "loaded_later", importlib.util.module_from_spec(spec))
    assert len(set(before)) > 100 and examples() == before
