"""No module imports itself through others: not at import time, not inside a function, not for type checkers."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from workspace import module_name, projects, sources


def _modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the workspace by its dotted name."""
    return {
        module_name(project, file): (file, ast.parse(file.read_text(encoding="utf-8")))
        for project in projects()
        for file in sources(project)
    }


def _imported(module: str, file: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the workspace that a module imports anywhere: at the top, in a function, under TYPE_CHECKING."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.add(submodule if submodule in known else source)
    return (found & known) - {module}


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {name: _imported(name, file, tree, set(modules)) for name, (file, tree) in modules.items()}


def test_the_module_graph_has_no_cycle() -> None:
    try:
        TopologicalSorter(_graph()).prepare()
    except CycleError as error:
        # graphlib lists the cycle against the direction of the imports.
        pytest.fail(
            "import cycle: " + " -> ".join(reversed(error.args[1])) + ". Move what both need to a third module."
        )


def test_the_graph_has_every_form_of_import() -> None:
    tree = ast.parse(
        "import pkg.a\nfrom . import b\nfrom .c import name\nfrom pkg import d\n"
        "if TYPE_CHECKING:\n    from .e import T\ndef f():\n    from .room import g\n"
    )
    known = {"pkg", "pkg.module", *(f"pkg.{name}" for name in "abcde"), "pkg.room", "pkg.room.g"}
    assert _imported("pkg.module", Path("module.py"), tree, known) == {
        *(f"pkg.{name}" for name in "abcde"),
        "pkg.room.g",
    }
