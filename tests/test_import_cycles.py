"""No module and no subpackage imports itself through others, and those of accel import only from lower floors.

Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import functools
import itertools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from workspace import module_name, projects, sources

# The floors of accel, from the ground up: a subpackage imports from lower floors only, never from its own.
# Modules of the top level count as subpackages. docs/architecture.md describes them.
FLOORS = [
    {"_torch_compat", "kwargs"},
    {"core"},
    {"precision", "reduction"},
    {"contract"},
    {"fsdp", "parallel", "deepspeed", "fault_tolerance", "training"},
    {"strategies"},
    {"setup"},
    {"checkpointer"},
    {"preemption"},
    {"accelerator"},
    {"functions", "local_sgd"},
    # The module paths of the reference: re-exports.
    {
        *("big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "logging"),
        *("memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking"),
    },
    {"utils"},
    {"self_test", "commands"},
]


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


@functools.cache
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


def _rooms(graph: dict[str, set[str]]) -> dict[str, dict[str, str]]:
    """The imports between the top-level subpackages and modules of each distribution, each with an example."""
    rooms: dict[str, dict[str, str]] = {}
    for module, imported in graph.items():
        room = ".".join(module.split(".")[:2])
        known = rooms.setdefault(room, {})
        for other in imported:
            target = ".".join(other.split(".")[:2])
            if target != room and target.split(".")[0] == room.split(".")[0]:
                known.setdefault(target, f"{module} imports {other}")
    return rooms


def test_the_graph_of_subpackages_has_no_cycle() -> None:
    rooms = _rooms(_graph())
    try:
        TopologicalSorter({room: set(imported) for room, imported in rooms.items()}).prepare()
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        steps = [rooms[room][target] for room, target in itertools.pairwise(cycle)]
        pytest.fail("subpackages import one another in a circle: " + "; ".join(steps))


def test_a_subpackage_of_accel_imports_from_lower_floors_only() -> None:
    floor_of = {f"accel.{room}": floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {room: imported for room, imported in _rooms(_graph()).items() if room.startswith("accel.")}
    assert set(rooms) == set(floor_of), "FLOORS must name each subpackage and top-level module of accel"
    upwards = []
    for room, imported in rooms.items():
        for target, example in imported.items():
            if target != "accel" and floor_of[target] >= floor_of[room]:
                upwards.append(example)
    assert not upwards


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
