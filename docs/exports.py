"""mkdocs hook: replaces `<!-- exports: accel_data -->` in a page by the reference of that package's exports.

The list of exports is the package's `__init__.pyi`, or its `__init__.py` if it has no stub.
`<!-- class: accel.Accelerator -->` becomes the reference of a class that has a page of its own: its methods, then its
attributes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

_MARK = re.compile(r"^<!-- exports: (?P<module>[\w.]+) -->$", re.MULTILINE)
_CLASS = re.compile(r"^<!-- class: (?P<path>[\w.]+) -->$", re.MULTILINE)
_OWN_PAGES = {"accel.Accelerator": "../reference/accelerator.md"}
_AVAILABLE = re.compile(r"is_\w+_available")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace the markers of a page; called by mkdocs."""
    root = Path(config.config_file_path).parent
    markdown = _CLASS.sub(lambda match: _class_reference(root, match["path"]), markdown)
    return _MARK.sub(lambda match: _reference(root, match["module"]), markdown)


def _reference(root: Path, module: str) -> str:
    defined, reexported = _exports(root, module)
    checks = [name for name in defined if _AVAILABLE.fullmatch(name)]
    elsewhere = [name for name in defined if f"{module}.{name}" in _OWN_PAGES]
    blocks = [f"[`{name}`]({_OWN_PAGES[f'{module}.{name}']}) has a page of its own." for name in elsewhere]
    blocks += [f"::: {module}.{name}" for name in defined if name not in checks and name not in elsewhere]
    if checks:
        blocks.append("Whether a library or a device is available: " + ", ".join(f"`{name}`" for name in checks) + ".")
    for source, names in reexported.items():
        blocks.append(f"From `{source}`: " + ", ".join(f"`{name}`" for name in names) + ".")
    return "\n\n".join(blocks)


def _exports(root: Path, module: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names that a package defines, and those that it re-exports, by the package that defines them."""
    distribution = module.split(".")[0].replace("_", "-")
    directory = root / "packages" / distribution / "src" / module.replace(".", "/")
    defined: list[str] = []
    reexported: dict[str, list[str]] = {}
    stub = directory / "__init__.pyi"
    source_file = stub if stub.exists() else directory / "__init__.py"
    for node in ast.parse(source_file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            defined.append(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = [alias.asname or alias.name for alias in node.names]
            source = node.module or ""
            if node.level or source.split(".")[0] == module.split(".")[0]:
                defined += names
            else:
                reexported.setdefault(source.split(".")[0], []).extend(names)
    return defined, reexported


def _class_reference(root: Path, path: str) -> str:
    """Return the reference of a class: its description and methods, then its attributes."""
    import griffe  # not installed where tests read the exports

    package, _, name = path.rpartition(".")
    sources = [str(source) for source in root.glob("packages/*/src")]
    loader = griffe.GriffeLoader(search_paths=sources)
    documented = loader.load(package)
    loader.resolve_aliases(external=False)
    members = {key: member for key, member in documented[name].all_members.items() if not key.startswith("_")}
    methods = [key for key, member in members.items() if member.is_function]
    attributes = [key for key in members if key not in methods]
    blocks = [
        f"::: {path}\n    options:\n      heading_level: 2\n      members: {methods}",
        "## Attributes",
        *(f"::: {path}.{key}" for key in attributes),
    ]
    return "\n\n".join(blocks)
