"""JSON in which what fits on a line of 120 characters is on one: a change of a fact is a change of its line."""

from __future__ import annotations

import json
import textwrap
from typing import Any

WIDTH = 120


def dumps(value: Any, depth: int = 0, before: int = 0) -> str:
    """The text of a value, with sorted keys; ``before`` is the number of characters before it on its line."""
    one = json.dumps(value, sort_keys=True)
    if not isinstance(value, (dict, list)) or before + len(one) < WIDTH:
        return one
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        keys = {key: f"{indent}{json.dumps(key)}: " for key in sorted(value)}
        lines = [text + dumps(value[key], depth + 1, len(text)) + "," for key, text in keys.items()]
    else:
        # As many items on a line as fit; textwrap breaks at their ends only.
        items = ", ".join(json.dumps(item).replace(" ", "\0") for item in value) + ","
        lines = textwrap.wrap(items, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{opening}\n" + "\n".join(lines).replace("\0", " ").removesuffix(",") + f"\n{indent[1:]}{closing}"
