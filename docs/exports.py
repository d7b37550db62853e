"""mkdocs hook: a line `<!-- exports: accel_data -->` in a page becomes the reference of what that package exports.

The list is the package's own `__init__.pyi`, so a new name is in the documentation with the commit that exports it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

_MARK = re.compile(r"^<!-- exports: (?P<module>[\w.]+) -->$", re.MULTILINE)
_AVAILABLE = re.compile(r"is_\w+_available")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    root = Path(config.config_file_path).parent
    return _MARK.sub(lambda found: _reference(root, found["module"]), markdown)


def _reference(root: Path, module: str) -> str:
    own, passed_on = _exports(root, module)
    questions = [name for name in own if _AVAILABLE.fullmatch(name)]
    blocks = [f"::: {module}.{name}" for name in own if name not in questions]
    if questions:
        blocks.append("Whether a library, or a device, is there: " + ", ".join(f"`{name}`" for name in questions) + ".")
    for source, names in passed_on.items():
        blocks.append(f"From `{source}`: " + ", ".join(f"`{name}`" for name in names) + ".")
    return "\n\n".join(blocks)


def _exports(root: Path, module: str) -> tuple[list[str], dict[str, list[str]]]:
    """The names that a package defines itself, and those that it passes on, by the package they come from."""
    distribution = module.split(".")[0].replace("_", "-")
    folder = root / "packages" / distribution / "src" / module.replace(".", "/")
    own: list[str] = []
    passed_on: dict[str, list[str]] = {}
    for node in ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
            source = node.module or ""
            if node.level or source.split(".")[0] == module.split(".")[0]:
                own += names
            else:
                passed_on.setdefault(source.split(".")[0], []).extend(names)
    return own, passed_on
