"""The examples of the README print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from accel_state import is_torch_version

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 multiplies 8-bit matrices on GPUs only")
def test_the_examples_print_what_the_readme_says() -> None:
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    for code, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected
