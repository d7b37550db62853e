"""How much of each distribution's public interface has types, as pyright sees it in the installed wheels.

    python scripts/type_completeness.py [DISTRIBUTION ...]

Builds the wheels, installs them into a temporary folder, and prints a table. Exits with 1 if less than 98% of the
public symbols of a distribution have a type that every type checker agrees on, and lists the others. The last column
counts parameters and results of public functions that are plain ``Any``, which pyright counts as a type.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.98


def install_wheels(projects: list[Path], site: Path) -> None:
    """Build the wheels of some distributions and install them, without what they depend on."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", str(site), *map(str, projects)], check=True)


def verify(package: str, site: Path) -> dict[str, Any]:
    """Pyright's report on a package.

    Raises:
        SystemExit: pyright cannot be run, or does not find the package.
    """
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [*command, "--verifytypes", package, "--ignoreexternal"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)["typeCompleteness"]
        report["completenessScore"], report["pyTypedPath"]
    except (json.JSONDecodeError, KeyError):
        raise SystemExit(f"pyright reports nothing on {package}:\n{done.stdout}{done.stderr}") from None
    return report


def incomplete(report: dict[str, Any]) -> Iterator[str]:
    """Yield the symbols without a type, with pyright's reason."""
    for symbol in report["symbols"]:
        if symbol["isExported"] and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]):
            reasons = [item["message"] for item in symbol["diagnostics"] if "docstring" not in item["message"].lower()]
            yield f"  {symbol['name']}: {' '.join(' '.join(reasons).split()) or 'it has such members'}"


def count_any(package: Path) -> int:
    """Parameters and results of public functions that are annotated with ``Any`` alone."""
    count = 0
    for file in package.rglob("*.py"):
        overloaded: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                overloaded.add(node.name)
            elif node.name in overloaded:
                continue  # what callers see are the overloads
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            annotations = [node.returns, *(parameter.annotation for parameter in parameters)]
            count += sum(isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations)
    return count


def main(names: list[str]) -> int:
    """Print the table of all distributions, or of those named; returns the exit status."""
    projects = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
    unknown = set(names) - {project.name for project in projects}
    if unknown:
        print(f"no distribution {', '.join(sorted(unknown))}. There are: {', '.join(p.name for p in projects)}")
        return 2
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder).resolve()
        install_wheels(projects, site)
        print(f"{'distribution':<18} {'typed':>6} {'symbols':>8} {'without':>8} {'Any':>5}")
        for project in projects:
            if names and project.name not in names:
                continue
            package = project.name.replace("-", "_")
            report = verify(package, site)
            counts, score = report["exportedSymbolCounts"], report["completenessScore"]
            without = counts["withAmbiguousType"] + counts["withUnknownType"]
            symbols, plain = without + counts["withKnownType"], count_any(site / package)
            print(f"{project.name:<18} {score:>6.1%} {symbols:>8} {without:>8} {plain:>5}", flush=True)
            if score < LEAST:
                failures += [f"{project.name} is below {LEAST:.0%}:", *incomplete(report)]
    print(*failures, sep="\n", end="\n" if failures else "")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
