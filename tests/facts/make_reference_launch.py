"""Make reference_launch.json: flags, types, defaults and choices of the reference's launcher, and the variables that it
hands over.

    python tests/facts/make_reference_launch.py LIST

LIST is a text with a line for each flag, and one for each variable:

    - `--zero_stage --zero-stage` type=int default=None choices=['0', '1']
    - `ACCELERATE_MIXED_PRECISION`
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import compact_json

TABLE = Path(__file__).with_name("reference_launch.json")

_FLAG = re.compile(
    r"^- `(?P<flags>-[^`]*)` type=(?P<type>\S+) default=(?P<default>.*?)(?: choices=(?P<choices>\[.*\]))?$"
)
_VARIABLE = re.compile(r"^- `(?P<name>[A-Z][A-Z0-9_]+)`$")


def main(listing: Path) -> None:
    """Read the list and write the table."""
    flags: dict[str, Any] = {}
    variables: list[str] = []
    for line in listing.read_text(encoding="utf-8").splitlines():
        if found := _FLAG.match(line):
            names = found["flags"].split()
            fact = {"flags": names, "type": found["type"], "default": ast.literal_eval(found["default"])}
            flags[next(name for name in names if name.startswith("--"))] = fact | _choices(found["choices"])
        elif found := _VARIABLE.match(line):
            variables.append(found["name"])
        elif line.startswith("- `-"):
            sys.exit(f"cannot read: {line}")
    text = compact_json.dumps({"flags": flags, "variables": sorted(variables)})
    TABLE.write_text(text + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(flags)} flags, {len(variables)} variables")


def _choices(text: str | None) -> dict[str, list[str]]:
    return {"choices": ast.literal_eval(text)} if text else {}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
