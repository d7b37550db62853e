"""mkdocs hook: replaces `<!-- options -->` in a page by lists of all options, generated from their declarations.

`<!-- options: TITLE -->` is replaced by the list of the group with that title. A list instead of a table: identifiers
are long, and a table of six columns cuts them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MARK = re.compile(r"^<!-- options -->$", re.MULTILINE)
_GROUP = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace the markers of a page; called by mkdocs."""
    if not _MARK.search(markdown) and not _GROUP.search(markdown):
        return markdown
    root = Path(config.config_file_path).parent
    markdown = _GROUP.sub(lambda match: listing(root, match[1]), markdown)
    return _MARK.sub(lambda _: reference(root), markdown)


def reference(root: Path) -> str:
    """Return one section with a list per group."""
    return "\n\n".join(_section(group) for group in _groups(root))


def listing(root: Path, title: str) -> str:
    """Return the list of the group with this title."""
    group = next(group for group in _groups(root) if group.title == title)
    return "\n".join(map(_item, group.options()))


def _groups(root: Path) -> Iterable[Any]:
    sys.path.insert(0, str(root / "packages" / "accel-state" / "src"))
    try:
        from accel_state.options import load_groups

        return load_groups()
    finally:
        sys.path.pop(0)


def _section(group: Any) -> str:
    title = group.title[0].upper() + group.title[1:]
    items = "\n".join(map(_item, group.options()))
    return re.sub(r"\n{3,}", "\n\n", f"## {title}\n\n{group.description}\n\n{items}")


def _item(opt: Any) -> str:
    flags = _codes(flag for flag in (*opt.flags, *opt.undo_flags) if not (flag.startswith("--") and "-" in flag[2:]))
    facts = [f"Value: {_value(opt)}."]
    if opt.default not in (None, "", (), False):
        facts.append(f"Default: `{opt.format(opt.default)}`.")
    if opt.env:
        facts.append(f"Variable: `{opt.env}`{' *' if opt.exported else ''}.")
    if opt.keys:
        facts.append(f"Key: {_codes(opt.keys)}.")
    return f"- **{flags}**: {opt.help}\n    <br>{' '.join(facts)}"


def _value(opt: Any) -> str:
    if opt.choices is not None:
        return _codes(opt.choices)
    return "given alone, or `true` or `false`" if opt.is_flag else opt.allowed().rstrip(".")


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
