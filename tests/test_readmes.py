"""The examples in READMEs print what is shown. tests/test_wheels.py runs those of every package, from the wheels."""

from __future__ import annotations

from pathlib import Path

import pytest
from readme_examples import run_examples
from workspace import ROOT

from accel_state import is_torch_version


@pytest.mark.parametrize(
    ("package", "examples"), [("accel-bigmodel", 2), ("accel-data", 2), ("accel-fp8", 2), ("accel-quant", 3)]
)
def test_the_examples_print_what_the_readme_says(
    package: str, examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "accel-fp8" and is_torch_version("<", "2.7"):
        pytest.skip("torch 2.6 multiplies 8-bit matrices on GPUs only")
    monkeypatch.chdir(tmp_path)
    assert run_examples(ROOT / "packages" / package / "README.md") == examples
