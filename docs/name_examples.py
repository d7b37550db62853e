"""The examples of the reference, one for each public name.

`name_examples/*.txt` has them, `tests/test_name_examples.py` runs them, and `reference_extension.py` shows them. A file
begins with code that all of its examples share. `== accel.utils.gather` starts the example of that name; a "!" after
the name marks one that needs several processes, a GPU or another library, and is only compiled.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("name_examples")


@dataclass(frozen=True)
class Example:
    """The example of a name, as lines of an interpreter."""

    name: str
    text: str
    shared: str
    runs: bool


@cache
def read(file: Path) -> tuple[Example, ...]:
    """The examples of a file."""
    shared, *entries = re.split(r"^== ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for entry in entries:
        head, _, text = entry.partition("\n")
        found.append(Example(head.rstrip(" !"), text.strip(), shared, not head.endswith("!")))
    return tuple(found)


def canonical(name: str) -> str:
    """Where a public name is defined: `accel.Accelerator.print` is `accel.accelerator.Accelerator.print`."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if inspect.isclass(value):
                owner = next(base for base in value.__mro__ if part in vars(base))
                return f"{owner.__module__}.{owner.__qualname__}.{part}"
            value = getattr(value, part)
        return f"{value.__module__}.{value.__qualname__}"
    raise ModuleNotFoundError(name)


@cache
def examples() -> dict[str, Example]:
    """All examples, by the place where their name is defined."""
    return {canonical(example.name): example for file in sorted(FOLDER.glob("*.txt")) for example in read(file)}
