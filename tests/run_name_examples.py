"""Runs the examples of docs/name_examples: one forked process a file, the names of one example in each namespace.

Prints the failures as JSON.
"""

from __future__ import annotations

import doctest
import functools
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked import forked, preload

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from name_examples import FOLDER, read

IMPORTS = "import torch\nfrom accel import *\nfrom accel.utils import *"


def failures_of(file: Path) -> list[str]:
    """The examples of a file that print something else than they show; each runs in an empty directory."""
    from accel_state import AcceleratorState

    failures, parent = [], Path.cwd()
    for example in read(file):
        if not example.runs:
            continue
        names: dict[str, Any] = {}
        os.chdir(tempfile.mkdtemp(dir=parent))  # first: the code that examples share writes files too
        exec(example.shared, names)
        AcceleratorState._reset_state(reset_partial_state=True)
        test = doctest.DocTestParser().get_doctest(example.text + "\n", names, example.name, str(file), 0)
        report = io.StringIO()
        if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write).failed:
            failures.append(report.getvalue())
    return failures


def main() -> None:
    preload(IMPORTS)
    failures: list[str] = []
    for file in sorted(FOLDER.glob("*.txt")):
        failures += forked(functools.partial(failures_of, file), file.name)
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
