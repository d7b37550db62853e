"""The exported names of each package are those of a committed list: a new public name is a reviewed decision.

`python tests/test_exports.py` writes the lists anew; the diff is what a reviewer looks at.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from workspace import import_name, module_name, projects, sources

FACTS = Path(__file__).parent / "facts" / "exports"
MEMBERS = FACTS.with_name("accelerator_members.txt")
UPDATE = "python tests/test_exports.py"
_DEFINES = re.compile(r"^(async def|class|def|@)", re.MULTILINE)


def _reexports(file: Path) -> list[str] | None:
    """The names of a module that consists of `from module import name as name` lines only; None for another module."""
    source = file.read_text(encoding="utf-8")
    if _DEFINES.search(source):  # parsing every module takes each worker a second
        return None
    _docstring, *body = ast.parse(source).body or [None]
    if not body or not all(isinstance(node, ast.ImportFrom) for node in body):
        return None
    aliases = [alias for node in body for alias in node.names]
    return sorted(alias.name for alias in aliases) if all(alias.asname == alias.name for alias in aliases) else None


def _lists_exports(file: Path) -> bool:
    return file.with_suffix(".pyi").exists() and "__all__" in file.read_text(encoding="utf-8")


@functools.cache
def _modules() -> list[str]:
    """Every package, and every public module in it that consists of re-exports, or lists its exports in a stub."""
    names = []
    for project in projects():
        for file in sources(project):
            name = module_name(project, file)
            is_public = not any(part.startswith("_") for part in name.split("."))
            if name == import_name(project) or (is_public and (_lists_exports(file) or _reexports(file))):
                names.append(name)
    return sorted(names)


def _needs_another_environment(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is None


def _exports(name: str) -> list[str]:
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return _reexports(Path(str(module.__file__))) or []


def _listed(name: str) -> list[str]:
    file = FACTS / f"{name}.txt"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


@pytest.mark.parametrize("name", _modules())
def test_exports_are_the_reviewed_ones(name: str) -> None:
    actual, listed = set(_exports(name)), set(_listed(name))
    assert actual == listed, (
        f"{name} exports {sorted(actual - listed)} beyond the list and lacks {sorted(listed - actual)}. "
        f"If that is meant, say so in the package's CHANGELOG and run `{UPDATE}`."
    )


@pytest.mark.parametrize("name", _modules())
def test_every_exported_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    exports = _exports(name)
    missing = [export for export in exports if not hasattr(module, export)]
    assert not missing, f"{name} lists {missing}, which its modules do not have"
    assert set(exports) <= set(dir(module))


def test_every_list_has_a_module() -> None:
    assert {file.stem for file in FACTS.glob("*.txt")} == set(_modules())


def _accelerator_members() -> list[str]:
    """The members of the Accelerator that scripts and libraries use, with their signatures."""
    accelerator, lines = importlib.import_module("accel").Accelerator, []
    for name in dir(accelerator):
        member = inspect.getattr_static(accelerator, name)
        if isinstance(member, property):
            kind = "property" if member.fset is None else "settable property"
            lines.append(f"{name}: {kind} {inspect.signature(member.fget)}")
        elif not name.startswith("_"):
            lines.append(f"{name}{inspect.signature(member)}" if callable(member) else name)
    return lines


def test_the_accelerator_has_the_reviewed_members() -> None:
    assert _accelerator_members() == MEMBERS.read_text(encoding="utf-8").splitlines(), (
        f"If the difference is meant, say so in the CHANGELOG of accel and run `{UPDATE}`."
    )


def main() -> None:
    MEMBERS.write_text("".join(f"{member}\n" for member in _accelerator_members()), encoding="utf-8")
    exports = {}  # before a list is deleted: a module may not import
    for name in _modules():
        exports[name] = _listed(name) if _needs_another_environment(name) else _exports(name)
    FACTS.mkdir(parents=True, exist_ok=True)
    for file in FACTS.glob("*.txt"):
        file.unlink()
    for name, names in exports.items():
        (FACTS / f"{name}.txt").write_text("".join(f"{export}\n" for export in names), encoding="utf-8")
        print(f"{FACTS.name}/{name}.txt: {len(names)} names")


if __name__ == "__main__":
    main()
