"""griffe extension: appends the examples of `name_examples/` to the docstrings of the reference."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from name_examples import examples


class NameExamples(griffe.Extension):
    """Appends the example of a name to its docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if (obj.is_class or obj.is_function) and (example := examples().get(obj.path)):
            text = obj.docstring.value if obj.docstring else ""
            lines = textwrap.indent(example.text, "    ")
            obj.docstring = griffe.Docstring(f"{text}\n\nExamples:\n{lines}", parent=obj)
