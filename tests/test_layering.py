"""The boundaries between and inside the packages: who imports whom, who names a vendor, who touches the environment."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspace import ROOT, import_name, metadata, module_name, projects, sources

# What each package may import of its siblings. Nothing imports accel.
SIBLINGS = {
    "accel_state": set(),
    "accel_data": {"accel_state"},
    "accel_launch": {"accel_state"},
    "accel": {"accel_state", "accel_data", "accel_launch"},
}

# Import names of distributions that are called otherwise.
DISTRIBUTIONS = {"yaml": "pyyaml"}

# Vendors, their libraries and their collectives, as words of an identifier or of a text that is not documentation.
VENDORS = re.compile(
    r"(?<![a-z])(cuda|cudnn|nccl|nvidia|rocm|hip|xpu|xccl|ccl|npu|hccl|mlu|cncl|musa|mccl|sdaa|tccl|hpu|hccl|habana|mps|xla|tpu|neuron)(?![a-z])",
    re.IGNORECASE,
)

# Where vendors are named outside accel_state/devices, and why.
VENDORS_NAMED = {
    "accel_state/enums.py": "the values of DistributedType, RNGType and DynamoBackend, which users write",
    "accel_state/imports.py": "is_cuda_available and its like are names that users import",
}

# Who may touch os.environ beside accel_state/env.py, and why.
ENVIRONMENT_TOUCHED: dict[str, str] = {}

MODULES = [(project, file) for project in projects() for file in sources(project)]


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix().split("/src/", 1)[1]


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _imports(project: Path, file: Path, tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolute module name that is imported anywhere in the file, with the statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = module_name(project, file).split(".")
                base = package if file.name == "__init__.py" else package[:-1]
                yield ".".join([*base[: len(base) - node.level + 1], *filter(None, [node.module])]), node
            else:
                yield node.module or "", node


def _documentation(tree: ast.AST) -> set[int]:
    """The ids of the constants that are docstrings, or texts that stand alone to describe an attribute."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def _words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and string in the code, documentation left out."""
    documentation = _documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.lineno, node.arg or ""
        elif isinstance(node, ast.alias):
            yield node.lineno, f"{node.name} {node.asname or ''}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def _touches_environment(tree: ast.AST) -> list[int]:
    """Lines that read or write os.environ, or have somebody of the os module do it."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return lines


def test_every_package_has_its_place_in_the_table() -> None:
    assert {import_name(project) for project in projects()} == set(SIBLINGS), "a new package states here what it may import"


@pytest.mark.parametrize(("project", "file"), MODULES, ids=lambda value: value.name if value.is_dir() else _path(value))
def test_imports_only_what_it_may(project: Path, file: Path) -> None:
    allowed = SIBLINGS[import_name(project)] | {import_name(project)}
    wrong = [
        f"line {node.lineno}: {name}"
        for name, node in _imports(project, file, _parse(file))
        if name.split(".")[0] in SIBLINGS and name.split(".")[0] not in allowed
    ]
    assert not wrong, f"{_path(file)} imports a package that {project.name} must not know: {wrong}"


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_siblings_that_are_imported_are_dependencies_and_the_other_way_round(project: Path) -> None:
    imported = {name.split(".")[0] for file in sources(project) for name, _ in _imports(project, file, _parse(file))}
    declared = {re.match(r"[\w-]+", text)[0].replace("-", "_") for text in metadata(project)["dependencies"]}  # type: ignore[index]
    assert imported & set(SIBLINGS) - {import_name(project)} == declared & set(SIBLINGS)


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_what_a_module_imports_at_its_top_is_a_declared_dependency(project: Path) -> None:
    declared = {re.match(r"[\w-]+", text)[0].lower() for text in metadata(project)["dependencies"]}  # type: ignore[index]
    undeclared = []
    for file in sources(project):
        tree = _parse(file)
        at_top = {id(node) for node in tree.body}
        for name, node in _imports(project, file, tree):
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top in SIBLINGS or DISTRIBUTIONS.get(top, top) in declared
            if id(node) in at_top and not known:
                undeclared.append(f"{_path(file)}:{node.lineno}: {name}")
    assert not undeclared, f"not in the dependencies of {project.name}; an optional library is imported where it is used: {undeclared}"


@pytest.mark.parametrize(("project", "file"), MODULES, ids=lambda value: value.name if value.is_dir() else _path(value))
def test_only_devices_name_a_vendor(project: Path, file: Path) -> None:
    path = _path(file)
    found = [f"line {line}: {word!r}" for line, word in _words(_parse(file)) if VENDORS.search(word)]
    if path.startswith("accel_state/devices/"):
        return
    if path in VENDORS_NAMED:
        assert found, f"{path} names no vendor any more: take it out of VENDORS_NAMED"
        return
    assert not found, f"{path}: ask the Device instead (accel_state/devices), or state the exception in VENDORS_NAMED: {found}"


@pytest.mark.parametrize(("project", "file"), MODULES, ids=lambda value: value.name if value.is_dir() else _path(value))
def test_only_env_touches_the_environment(project: Path, file: Path) -> None:
    path = _path(file)
    lines = _touches_environment(_parse(file))
    if path == "accel_state/env.py":
        assert lines
        return
    if path in ENVIRONMENT_TOUCHED:
        assert lines, f"{path} touches no variable any more: take it out of ENVIRONMENT_TOUCHED"
        return
    assert not lines, f"{path} touches os.environ in lines {lines}: use the readers of accel_state/env.py, or state the exception here"


def test_the_exceptions_exist() -> None:
    paths = {_path(file) for _, file in MODULES}
    assert {*VENDORS_NAMED, *ENVIRONMENT_TOUCHED} <= paths


def test_the_walks_see_what_they_look_for() -> None:
    tree = ast.parse('import os\nx = torch.cuda.device("npu:0")\nos.environ["A"] = "1"\n"about cuda"\ndef f(xla_device): "hpu"')
    assert {word for _, word in _words(tree) if VENDORS.search(word)} == {"xla_device", "cuda", "npu:0"}
    assert _touches_environment(tree) == [3]
    project, file = projects()[0], projects()[0] / "src" / "accel" / "sub" / "module.py"
    found = [name for name, _ in _imports(project, file, ast.parse("from ..other import x\nfrom . import y\nimport accel_data.a"))]
    assert found == ["accel.other", "accel.sub", "accel_data.a"]
