"""Runs the examples of a README in one namespace, and compares what they print with the block that follows each."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any


def run_examples(readme: Path) -> int:
    """Run them, and return their number; an AssertionError says what is different."""
    text = readme.read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for code, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected, f"printed:\n{printed.getvalue()}\nthe README shows:\n{expected}"
    return len(examples)


if __name__ == "__main__":
    print(run_examples(Path(sys.argv[1])))
