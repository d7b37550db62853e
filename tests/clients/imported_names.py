"""Find names that installed packages import from accelerate and that accel lacks, without running the packages.

    python tests/clients/imported_names.py [PACKAGE | DIRECTORY ...]

Reads the sources of the packages (all that are installed where this Python runs, without arguments), or those in
directories (`pip install --no-deps --target DIRECTORY ...` fills one without running anything), and collects every
``from accelerate.x import y``, every ``import accelerate.x`` and every attribute path that begins with an imported
module of accelerate. Then it looks each of them up, with accel in the place of accelerate, prints those that are
missing with the files that use them, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "accelerate"


def sources(distributions: list[str]) -> Iterator[Path]:
    """The Python files of distributions that mention accelerate; of all installed ones if none are named."""
    for directory in filter(is_directory, distributions):
        yield from (path for path in Path(directory).rglob("*.py") if b"accelerate" in path.read_bytes())
    named = [name for name in distributions if not is_directory(name)]
    if distributions and not named:
        return
    found = [importlib.metadata.distribution(name) for name in named] if named else importlib.metadata.distributions()
    for distribution in found:
        name = distribution.metadata["Name"] or ""
        if name == PACKAGE or name.startswith("accel-") or name == "accel":
            continue
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if path.suffix == ".py" and path.is_file() and b"accelerate" in path.read_bytes():
                yield path


def is_directory(name: str) -> bool:
    """Whether an argument names a directory, and not a distribution."""
    return "/" in name and Path(name).is_dir()


def imported(path: Path) -> set[str]:
    """The dotted names of accelerate that a file imports, or reaches as attributes of its modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes of old sources
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return set()
    names, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            if node.module.split(".")[0] == PACKAGE:
                names |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    names.add(alias.name)
                    modules[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    for node in ast.walk(tree):
        parts: list[str] = []
        target: ast.AST = node
        while isinstance(target, ast.Attribute):
            parts.insert(0, target.attr)
            target = target.value
        if parts and isinstance(target, ast.Name) and target.id in modules:
            names.add(".".join([modules[target.id], *parts]))
    return names


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, as a module or from one. Attributes of values are not followed."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        if count == len(parts):
            return True
        return hasattr(value, parts[count])
    return False


def main() -> int:
    """Print the missing names, and return the exit code."""
    parser = argparse.ArgumentParser(description="Names that packages import from accelerate and that accel lacks.")
    parser.add_argument(
        "packages", nargs="*", help="distributions or directories to read; by default all that are installed"
    )
    arguments = parser.parse_args()
    from accel_compat import install

    install()
    users = defaultdict(set)
    for path in sources(arguments.packages):
        for name in imported(path):
            users[name].add(str(path))
    missing = {name: files for name, files in sorted(users.items()) if not exists(name)}
    for name, files in missing.items():
        print(f"{name}: {', '.join(sorted(files)[:3])}")
    print(f"{len(users)} names, {len(missing)} missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
