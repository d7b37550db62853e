"""Changes a module in one place after another, and tells which changes its tests do not notice; see scripts/mutate."""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}


FIRST_RUN = "first_run.json"


@dataclass(frozen=True)
class Mutation:
    """One change of a module: where it is, what it replaces, and the source with it."""

    line: int
    change: str
    source: str


def _replacement(node: ast.AST) -> ast.AST | None:
    """Return what takes the place of a node; None for nodes that stay."""
    if type(node) in _OPERATORS:
        return _OPERATORS[type(node)]()
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.Pass()
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
        return ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        return ast.Return(ast.Constant(None))
    return None


def _places(node: ast.AST, line: int = 0) -> Iterator[tuple[ast.AST, str, int | None, int]]:
    """Yield every field that may change: its owner, name, index in a list, and line.

    Not annotations, nor texts of errors.
    """
    line = getattr(node, "lineno", line)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (isinstance(node, ast.Raise)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield node, name, index, getattr(child, "lineno", line)
                yield from _places(child, line)


def mutations(source: str) -> Iterator[Mutation]:
    """Yield all changes of a module, in the order of its lines."""
    original = ast.parse(source)
    for number, (owner, name, index, line) in enumerate(_places(original)):
        child = getattr(owner, name) if index is None else getattr(owner, name)[index]
        if _replacement(child) is None:
            continue
        changed = copy.deepcopy(original)
        copied = next(place for at, place in enumerate(_places(changed)) if at == number)[0]
        replacement = _replacement(child)
        before = ast.unparse(copied)
        if index is None:
            setattr(copied, name, replacement)
        else:
            getattr(copied, name)[index] = replacement
        what = ast.unparse(child) if isinstance(child, ast.stmt) else before
        now = "(left out)" if isinstance(replacement, ast.Pass) else ast.unparse(ast.fix_missing_locations(copied))
        now = ast.unparse(ast.fix_missing_locations(replacement)) if isinstance(replacement, ast.Return) else now
        yield Mutation(line, f"{_short(what)}  ->  {_short(now)}", ast.unparse(ast.fix_missing_locations(changed)))


def _short(text: str) -> str:
    first, _, rest = text.partition("\n")
    return f"{first[:60]}..." if rest or len(first) > 60 else first


class FirstRun:
    """A plugin of pytest that writes down, at the first run, how long tests took and what they imported.

    Later runs, with a change, begin with the quickest tests.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_first = not file.exists()
        self._seconds: dict[str, float] = {}
        if not self._is_first:
            self._seconds = json.loads(file.read_text(encoding="utf-8"))["seconds"]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self._is_first:
            files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
            installed = [name for name, file in files.items() if "site-packages" in file]
            self._file.write_text(json.dumps({"seconds": self._seconds, "installed": installed}), encoding="utf-8")


def import_installed(file: Path) -> None:
    """Import what the tests imported at the first run, except the packages of the workspace: all later runs have it."""
    for name in json.loads(file.read_text(encoding="utf-8"))["installed"]:
        with suppress(Exception):  # some of it can only be imported in a certain order: the tests import that
            importlib.import_module(name)


def run_tests(tests: list[str], overlay: Path, seconds: float) -> bool:
    """Return True if the tests pass, in a forked process that has torch already and finds the overlay first."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(overlay / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(overlay), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(overlay))
        import pytest
        from hypothesis import Phase, settings

        # A failure is enough: the smallest example costs minutes. Later profiles inherit from this one.
        settings.register_profile("mutate", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutate")
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, *tests], plugins=[FirstRun(overlay / FIRST_RUN)]))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.05)
        return False
    finally:  # also when this process is interrupted: the tests have a session of their own
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def default_tests(module: str) -> list[str]:
    """Return the test files of the module's distribution that name the module."""
    distribution, _, rest = module.partition(".")
    folder = ROOT / "packages" / distribution.replace("_", "-") / "tests"
    name = rest.rpartition(".")[2]
    return [str(file) for file in sorted(folder.glob("test_*.py")) if name in file.read_text(encoding="utf-8")]


def drawn(changes: list[Mutation], sample: int | None, seed: int) -> list[Mutation]:
    """Return all changes, or as many of them as ``sample`` says, drawn with ``seed``, in the order of their lines."""
    if sample is None or sample >= len(changes):
        return changes
    return [changes[index] for index in sorted(random.Random(seed).sample(range(len(changes)), sample))]


def survivors(file: Path, changes: list[Mutation], tests: list[str], say: Callable[[str], None]) -> list[str]:
    """Return the changes of a module's file that the tests do not notice.

    Raises:
        SystemExit: the tests fail without a change.
    """
    parts = file.relative_to(ROOT / "packages").parts
    source_folder, package = ROOT / "packages" / parts[0] / "src", parts[2]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source_folder / package, overlay / package, ignore=ignored)
        target = overlay / file.relative_to(source_folder)
        began = time.monotonic()
        if not run_tests(tests, overlay, 600):
            raise SystemExit(f"the tests fail without a change:\n{(overlay / 'log').read_text()[-3000:]}")
        import_installed(overlay / FIRST_RUN)
        limit = 5 * (time.monotonic() - began) + 20
        for mutation in changes:
            target.write_text(mutation.source, encoding="utf-8")
            Path(importlib.util.cache_from_source(str(target))).unlink(missing_ok=True)
            if run_tests(tests, overlay, limit):
                unnoticed.append(f"{file.relative_to(ROOT)}:{mutation.line}: {mutation.change}")
                say(unnoticed[-1])
    return unnoticed


def main() -> None:
    """Read the command line, and print what is not noticed and a row of the table in CONTRIBUTING.md."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("module", help="such as accel_data.shard_math")
    parser.add_argument(
        "tests", nargs="*", help="test files; by default those of its distribution that name the module"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run those of the tests that pytest selects with it")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of the changes, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="draw others with another number (default: 0)")
    arguments = parser.parse_intermixed_args()
    package, *parts = arguments.module.split(".")
    file = ROOT.joinpath("packages", package.replace("_", "-"), "src", package, *parts).with_suffix(".py")
    if not file.is_file():
        parser.error(f"{arguments.module} is not a module of packages/: {file} does not exist")
    if arguments.sample is not None and arguments.sample < 1:
        parser.error(f"--sample {arguments.sample}: a number of changes from 1 on is needed")
    every = list(mutations(file.read_text(encoding="utf-8")))
    changes = drawn(every, arguments.sample, arguments.seed)
    if arguments.list:
        for mutation in changes:
            print(f"{file.relative_to(ROOT)}:{mutation.line}: {mutation.change}")
        return
    tests = arguments.tests or default_tests(arguments.module)
    if not tests:
        parser.error(f"no test of {package} names {parts[-1]}. Name the test files.")
    tests = [*tests, *(["-k", arguments.k] if arguments.k else [])]
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    import torch  # noqa: F401 - once, for all forked processes

    unnoticed = survivors(file, changes, tests, lambda line: print(line, flush=True))
    tried, noticed = len(changes), len(changes) - len(unnoticed)
    count = f"{tried} of {len(every)}, seed {arguments.seed}" if tried < len(every) else f"{tried}"
    print(f"| `{arguments.module}` | {count} | {noticed} | {noticed / max(tried, 1):.0%} |")


if __name__ == "__main__":
    main()
