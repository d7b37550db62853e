"""The boundaries between and inside the packages: imports, names of vendors, and access to the environment."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workspace import ROOT, import_name, metadata, module_name, projects, sources

# The siblings that each package may import. Only accel_plan, accel_compat and accel_megatron (a strategy) import accel;
# nothing imports them.
SIBLINGS = {
    "accel_state": set(),
    "accel_data": {"accel_state"},
    "accel_launch": {"accel_state"},
    "accel_bigmodel": {"accel_state"},
    "accel_checkpoint": {"accel_state"},
    "accel_quant": {"accel_state", "accel_bigmodel"},
    "accel_megatron": {"accel", "accel_state", "accel_checkpoint", "accel_data", "accel_launch"},
    "accel_track": {"accel_state"},
    "accel_fp8": {"accel_state"},
    "accel_monitor": {"accel_state"},
    "accel_plan": {"accel", "accel_state", "accel_data", "accel_launch", "accel_bigmodel"},
    "accel_compat": {"accel", "accel_state", "accel_launch"},
    "accel": {"accel_state", "accel_checkpoint", "accel_data", "accel_launch", "accel_bigmodel", "accel_track"},
}

# Siblings that a package depends on and loads by their registered names, so that nothing in it imports them.
KNOWN_BY_NAME = {"accel": {"accel_fp8"}}

# Distributions whose import name differs from their own name.
DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}

# Vendors, their libraries and their collectives, as words of an identifier or of a text that is not documentation.
_NAMES = (
    "cuda cudnn nccl nvidia rocm hip xpu xccl ccl npu hccl mlu cncl musa mccl sdaa tccl hpu habana mps xla tpu neuron"
)
VENDORS = re.compile(rf"(?<![a-z])({_NAMES.replace(' ', '|')})(?![a-z])", re.IGNORECASE)

# Files and directories that name vendors, and why.
VENDORS_NAMED = {
    "accel_monitor/flops.py": "names of torch's kernels of attention",
    "accel_launch/torchrun_options.py": "values of torchrun's options, and variables of libraries",
    "accel_compat/parsers.py": "tpu_command_parser and tpu_command_launcher are names of the reference's command",
    "accel_compat/test_utils/__init__.py": "require_cuda is a name that test suites import",
    "accel_compat/test_utils/testing.py": "require_cuda is a name that test suites import",
    "accel_state/devices/": "one file for each",
    "accel_state/ports.py": "the variable of a collective library, which launchers set before there is a device",
    "accel_state/collectives/xla.py": "the variant of this name",
    "accel_state/collectives/registry.py": "registers it",
    "accel_state/_torch_compat.py": "names of the private functions of torch_xla",
    "accel/parallel/async_products.py": "torch has its operators over symmetric memory for the GPUs of one vendor",
    "accel/strategies/xla.py": "the variant of this name",
    "accel/strategies/xla_spmd.py": "the variant of this name",
    "accel/setup/registry.py": "registers them",
    "accel_state/enums.py": "the values of DistributedType, RNGType and DynamoBackend, which users write",
    "accel_state/device_checks.py": "is_cuda_available and check_cuda_p2p_ib_support are names that users import",
    "accel/state.py": "names that users import",
    "accel/utils/": "names that users import",
    "accel_state/state/gradient.py": "is_xla_gradients_synced is a name that users write",
    "accel_launch/accelerators/": "one file for each: counted without torch, before there is a process that could ask "
    "a Device",
    "accel_megatron/": "Megatron-core is written for the GPUs of one vendor",
    "accel_fp8/backends/te.py": "says whose GPUs it is made for",
    "accel_state/options/": "names of options, and choices, that users write",
    "accel_launch/commands/env.py": "variables that a bug report shows",
    "accel_launch/config/write.py": "names of options",
    "accel_launch/questionnaire/": "names of options, and the words for choices",
    "accel_launch/launch_context.py": "a way of launching of this name",
    "accel_launch/network/agreement.py": "names of options, and variables in which machines should not differ",
    "accel_launch/launchers/registry.py": "registers it",
    "accel_launch/launchers/tpu.py": "the variant of this name",
    "accel_launch/elastic/agent.py": "a variable that torchrun sets",
    "accel_launch/launchers/tpu_pod.py": "the variant of this name",
    "accel_launch/launchers/mpirun.py": "prefixes of variables that are passed on to other machines",
    "accel_launch/tpu_function.py": "the variant of this name",
    "accel_launch/mpi.py": "a variable of Intel MPI's collectives",
    "accel_launch/cloud/gcloud.py": "gcloud's own words",
    "accel_plan/plan.py": "the name of an option",
    "accel_launch/command.py": "registers a command of this name",
    "accel_launch/commands/tpu_config.py": "the command of this name",
    "accel_compat/modules.py": "names that users import",
    "accel_compat/names.py": "names that users import",
    "accel_compat/absent.py": "the command of this name",
    "accel_launch/doctor/": "advice names the variables of collective libraries",
    "accel_launch/remedies.py": "words of collective libraries, in messages of theirs, and their variables",
    "accel_launch/elastic/report.py": "words of collective libraries, in messages of theirs",
    "accel_launch/notebook.py": "a notebook whose session holds a CUDA context already is told who took it",
    "accel/kwargs/handlers.py": "the default of a parameter that users know",
    "accel/precision/scaler.py": "the default of torch.amp.GradScaler",
}

# Files and directories other than accel_state/env.py that use os.environ, and why.
ENVIRONMENT_TOUCHED = {
    "accel_state/env.py": "the readers and writers that all other modules use",
    "accel_state/devices/": "variables of the vendor, not of a launcher",
    "accel_state/device_checks.py": "variables of the vendor, not of a launcher",
    "accel_state/environments/registry.py": "hands all variables to the environments, each of which says what is its "
    "own",
    "accel_state/testing.py": "the environment of the processes it starts",
    "accel_state/_test_worker.py": "the environment of the process it is",
    "accel_launch/launch_plan.py": "the environment of the processes it starts",
    "accel_launch/commands/doctor.py": "the environment of the processes it starts",
    "accel_launch/launchers/rank.py": "the environment that mpirun gave to a rank",
    "accel_launch/notebook.py": "the environment of the processes it starts",
    "accel_launch/elastic/": "the environment of the processes it starts, and the variables of torchrun",
}

# Private names that several distributions know, and why.
PRIVATE_NAMES_SHARED = {
    "_accelerate_added_attributes": "on a user's module, where clients look for it",
    "_hf_hook": "on a user's module, where clients look for it",
    "_is_accelerate_prepared": "on a user's object, where clients look for it",
    "_add_dataloader": "of the reference's GradientState, which clients call",
    "_remove_dataloader": "of the reference's GradientState, which clients call",
    "_shared_state": "of the reference's states, which clients read",
    "_reset_state": "of the reference's states, which clients call",
    "_from_accelerator": "an argument of the reference",
    "_from_accelerator_state": "an argument of the reference",
    "_owners": "accel notes in the AcceleratorState which Accelerators use it",
    "_mixed_precision": "accel compares it with what an Accelerator needs, without making an AcceleratorState",
}
# Private names of the standard library, of torch and of others that some distribution also defines.
PRIVATE_NAMES_OF_OTHERS = set(
    "_apply _config _exit _fields _handle _local_tensor _make _parameters _step_count _token _version".split()
)

MODULES = [(project, file) for project in projects() for file in sources(project)]


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix().split("/src/", 1)[1]


def _exception(path: str, table: dict[str, str]) -> str | None:
    """The entry of the table for a file: its own, or that of its directory."""
    return next((entry for entry in table if path == entry or (entry.endswith("/") and path.startswith(entry))), None)


@functools.cache
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
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


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


def _vendors(tree: ast.Module) -> list[str]:
    return [f"line {line}: {word}" for line, word in _words(tree) if VENDORS.search(word)]


def _touches_environment(tree: ast.Module) -> list[str]:
    """Lines that read or write os.environ, or call functions of os that do."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return [f"line {line}" for line in lines]


def test_every_package_is_in_the_table() -> None:
    assert {import_name(project) for project in projects()} == set(SIBLINGS), (
        "a new package states here what it may import"
    )


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_imports_only_allowed_packages(project: Path) -> None:
    allowed = SIBLINGS[import_name(project)] | {import_name(project)}
    wrong = [
        f"{_path(file)}:{node.lineno}: {name}"
        for file in sources(project)
        for name, node in _imports(project, file, _parse(file))
        if name.split(".")[0] in SIBLINGS and name.split(".")[0] not in allowed
    ]
    assert not wrong, f"{project.name} may import {sorted(allowed)} only: {wrong}"


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_siblings_that_are_imported_are_dependencies(project: Path) -> None:
    imported = {name.split(".")[0] for file in sources(project) for name, _ in _imports(project, file, _parse(file))}
    declared = {re.match(r"[\w-]+", text)[0].replace("-", "_") for text in metadata(project)["dependencies"]}  # type: ignore[index]
    assert imported & set(SIBLINGS) - {import_name(project)} <= declared
    assert declared & set(SIBLINGS) <= SIBLINGS[import_name(project)] | KNOWN_BY_NAME.get(import_name(project), set())


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_top_level_imports_are_declared_dependencies(project: Path) -> None:
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
    assert not undeclared, (
        f"not in the dependencies of {project.name}; an optional library is imported where it is used: {undeclared}"
    )


def _files_where(
    found: Callable[[ast.Module], list[str]], table: dict[str, str]
) -> tuple[dict[str, list[str]], set[str]]:
    """Findings in files that have no exception, by path; and unused exceptions."""
    wrong, unused = {}, set(table)
    for _, file in MODULES:
        path = _path(file)
        if findings := found(_parse(file)):
            exception = _exception(path, table)
            unused.discard(exception or "")
            if exception is None:
                wrong[path] = findings
    return wrong, unused


def test_only_devices_name_a_vendor() -> None:
    wrong, unused = _files_where(_vendors, VENDORS_NAMED)
    assert not wrong, f"ask the Device instead (accel_state/devices), or state the exception in VENDORS_NAMED: {wrong}"
    assert not unused, f"these exceptions are needed no more: {unused}"


def test_only_env_touches_the_environment() -> None:
    wrong, unused = _files_where(_touches_environment, ENVIRONMENT_TOUCHED)
    assert not wrong, f"use the readers of accel_state/env.py, or state the exception in ENVIRONMENT_TOUCHED: {wrong}"
    assert not unused, f"these exceptions are needed no more: {unused}"


_PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def _private_names_used(tree: ast.AST) -> set[str]:
    """Private names that are read, imported or passed, and texts that are one, for getattr and the like."""
    used: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Constant):
            used.add(node.value)
        elif isinstance(node, ast.keyword):
            used.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return {name for name in used if isinstance(name, str) and _PRIVATE.fullmatch(name)}


def _private_names_defined(tree: ast.AST) -> set[str]:
    defined: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            defined.add(getattr(node, "attr", None) or getattr(node, "id", None))
            index = getattr(node, "slice", None)
            defined.add(index.value if isinstance(index, ast.Constant) else None)
    return {name for name in defined if isinstance(name, str) and _PRIVATE.fullmatch(name)}


def test_no_distribution_uses_private_names_of_another() -> None:
    """A name that starts with _ may change with any release of its distribution: siblings of two releases must fit."""
    defined = {project: set[str]() for project in projects()}
    for project, file in MODULES:
        defined[project] |= _private_names_defined(_parse(file))
    found = set()
    for project, file in MODULES:
        foreign = set().union(*(names for other, names in defined.items() if other != project)) - defined[project]
        found |= {(_path(file), name) for name in _private_names_used(_parse(file)) & foreign}
    wrong = sorted(entry for entry in found if entry[1] not in {*PRIVATE_NAMES_SHARED, *PRIVATE_NAMES_OF_OTHERS})
    assert not wrong, f"give these a public name, or say why they are shared in PRIVATE_NAMES_SHARED: {wrong}"
    unused = (set(PRIVATE_NAMES_SHARED) | PRIVATE_NAMES_OF_OTHERS) - {name for _, name in found}
    assert not unused, f"these exceptions are needed no more: {sorted(unused)}"


def test_the_search_for_private_names_finds_every_form() -> None:
    tree = ast.parse("from a import _b\nc._d\nsetattr(e, '_f', 1)\ng(_h=1)\nself._i = 1\nx['_j'] = 2\ndef _k(_l): ...")
    assert _private_names_used(tree) == {"_b", "_d", "_f", "_h", "_i", "_j"}
    assert _private_names_defined(tree) == {"_i", "_j", "_k", "_l"}


def test_the_searches_find_their_targets() -> None:
    tree = ast.parse(
        'import os\nx = torch.cuda.device("npu:0")\nos.environ["A"] = "1"\n"about cuda"\ndef f(xla_device): "hpu"'
    )
    assert {word for _, word in _words(tree) if VENDORS.search(word)} == {"xla_device", "cuda", "npu:0"}
    assert _touches_environment(tree) == ["line 3"]
    project, file = projects()[0], projects()[0] / "src" / "accel" / "sub" / "module.py"
    found = [
        name
        for name, _ in _imports(project, file, ast.parse("from ..other import x\nfrom . import y\nimport accel_data.a"))
    ]
    assert found == ["accel.other", "accel.sub", "accel_data.a"]
