"""The examples of the reference, one for each public name.

`name_examples/*.txt` has them, `tests/test_name_examples.py` runs them, and `reference_extension.py` shows them. A file
begins with code that all of its examples share. `== accel.utils.gather` starts the example of that name; a "!" after
the name marks one that needs several processes, a GPU or another library, and is only compiled. A "*" marks one that
is in the docstring, where editors show it: those of the names that are used most.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
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
    in_docstring: bool


@cache
def read(file: Path) -> tuple[Example, ...]:
    """Return the examples of a file."""
    shared, *entries = re.split(r"^== ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for entry in entries:
        head, _, text = entry.partition("\n")
        name, in_docstring = head.rstrip(" !*"), head.endswith("*")
        text = example_of(docstring(name)) if in_docstring else text.strip()
        found.append(Example(name, text, shared, not head.endswith("!"), in_docstring))
    return tuple(found)


def docstring(name: str) -> str:
    """Return the docstring of a public name."""
    return inspect.getdoc(resolve(name)[-1]) or ""


def example_of(docstring: str) -> str:
    """Return the section of examples of a docstring, which is its last one."""
    return textwrap.dedent(docstring.partition("\nExamples:\n")[2]).strip()


def resolve(name: str) -> list[Any]:
    """Return the module of a public name, and what each further part of the name is."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            values: list[Any] = [importlib.import_module(".".join(parts[:length]))]
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            values.append(getattr(values[-1], part))
        return values
    raise ModuleNotFoundError(name)


def canonical(name: str) -> str:
    """Return where a public name is defined: `accel.Accelerator.print` is `accel.accelerator.Accelerator.print`."""
    *_, holder, value = resolve(name)
    if inspect.isclass(holder):
        part = name.rpartition(".")[2]
        owner = next(base for base in holder.__mro__ if part in vars(base))
        return f"{owner.__module__}.{owner.__qualname__}.{part}"
    return f"{value.__module__}.{value.__qualname__}"


@cache
def examples() -> dict[str, Example]:
    """Return all examples, by the place where their name is defined."""
    return {canonical(example.name): example for file in sorted(FOLDER.glob("*.txt")) for example in read(file)}
