"""Runs the examples of docs/name_examples: one forked process a file, the names of one example in each namespace.

Prints the failures as JSON.
"""

from __future__ import annotations

import doctest
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

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
        exec(example.shared, names)
        AcceleratorState._reset_state(reset_partial_state=True)
        os.chdir(tempfile.mkdtemp(dir=parent))
        test = doctest.DocTestParser().get_doctest(example.text + "\n", names, example.name, str(file), 0)
        report = io.StringIO()
        if doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write).failed:
            failures.append(report.getvalue())
    return failures


def main() -> None:
    exec(IMPORTS, {})  # once, before the forks
    failures: list[str] = []
    for file in sorted(FOLDER.glob("*.txt")):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                found = failures_of(file)
                with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
                    json.dump(found, pipe)
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        failures += json.loads(text) if text else [f"{file.name}: the process ended with status {status}"]
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
