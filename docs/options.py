"""mkdocs hook: replaces `<!-- options -->` in a page by tables of all options, generated from their declarations.

`<!-- options: TITLE -->` is replaced by the table of the group with that title.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MARK = re.compile(r"^<!-- options -->$", re.MULTILINE)
_GROUP = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_HEAD = "| Option | Value | Default | Variable | Key | What it does |\n|---|---|---|---|---|---|"


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace the markers of a page; called by mkdocs."""
    if not _MARK.search(markdown) and not _GROUP.search(markdown):
        return markdown
    root = Path(config.config_file_path).parent
    markdown = _GROUP.sub(lambda match: table(root, match[1]), markdown)
    return _MARK.sub(lambda _: reference(root), markdown)


def reference(root: Path) -> str:
    """One section with a table per group."""
    return "\n\n".join(_section(group) for group in _groups(root))


def table(root: Path, title: str) -> str:
    """The table of the group with this title."""
    group = next(group for group in _groups(root) if group.title == title)
    return "\n".join([_HEAD, *map(_row, group.options())])


def _groups(root: Path) -> Iterable[Any]:
    sys.path.insert(0, str(root / "packages" / "accel-state" / "src"))
    try:
        from accel_state.options import load_groups

        return load_groups()
    finally:
        sys.path.pop(0)


def _section(group: Any) -> str:
    rows = [_row(opt) for opt in group.options()]
    title = group.title[0].upper() + group.title[1:]
    return "\n".join([f"## {title}", "", group.description, "", _HEAD, *rows]).replace("\n\n\n\n", "\n\n")


def _row(opt: Any) -> str:
    flags = _codes(flag for flag in (*opt.flags, *opt.undo_flags) if not (flag.startswith("--") and "-" in flag[2:]))
    default = "" if opt.default in (None, "", ()) else f"`{opt.format(opt.default)}`"
    variable = f"`{opt.env}`{' *' if opt.exported else ''}" if opt.env else ""
    cells = (flags, _value(opt), default, variable, _codes(opt.keys), opt.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(opt: Any) -> str:
    if opt.choices is not None:
        return _codes(opt.choices)
    return "given alone, or `true` or `false`" if opt.is_flag else opt.allowed()


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
