"""Runs the examples of docs/name_examples, with the names of each example in its own namespace."""

from __future__ import annotations

import doctest
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def failures_of(file: Path, folder: Path) -> list[str]:
    """Return the reports of examples in a file that do not print what they show; each runs in its own directory."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
    from name_examples import read

    from accel_state import AcceleratorState

    failures = []
    for example in read(file):
        if not example.runs:
            continue
        names: dict[str, Any] = {}
        os.chdir(tempfile.mkdtemp(dir=folder))  # first: the code that examples share writes files too
        exec(example.shared, names)
        AcceleratorState._reset_state(reset_partial_state=True)
        test = doctest.DocTestParser().get_doctest(example.text + "\n", names, example.name, str(file), 0)
        report = io.StringIO()
        if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write).failed:
            failures.append(report.getvalue())
    return failures
