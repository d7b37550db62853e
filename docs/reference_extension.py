"""griffe extension: appends the other examples of `name_examples/` to the docstrings of the reference."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
# Installed with Megatron-core only; its sources import without it.
sys.path.append(str(Path(__file__).parents[1] / "packages/accel-megatron/src"))
from name_examples import examples


class NameExamples(griffe.Extension):
    """Appends the example of a name to its docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Run by griffe for each object that it has read."""
        if (obj.is_class or obj.is_function) and (example := examples().get(obj.path)):
            if example.in_docstring:
                return
            if obj.docstring is None:
                obj.docstring = griffe.Docstring("", parent=obj, parser="google")
            # The docstring itself, which knows how it is to be parsed.
            obj.docstring.value += "\n\nExamples:\n" + textwrap.indent(example.text, "    ")
