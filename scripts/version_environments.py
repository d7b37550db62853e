"""For scripts/test-versions: interpreters, declared floors, counted tests, and the table of docs/hardware.md."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hardware.md"
MINORS = range(10, 15)
BEGIN, END = "<!-- scripts/test-versions -->", "<!-- end of scripts/test-versions -->"
_HEAD = """\
| versions | Python | PyTorch | tests | passed | failed | skipped |
| --- | --- | --- | --- | ---: | ---: | ---: |"""
_FLOOR = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9][0-9.]*)")


def interpreters() -> dict[int, str]:
    """Return the Pythons of this machine by minor version, from 3.10 on: those on the PATH, and those of pyenv."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        names = [f"python3.{minor}", *map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"), reverse=True))]
        for name in names:
            try:
                # pyenv has commands of this name that only say where the interpreter is.
                done = subprocess.run([name, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
            except OSError:
                continue
            if done.returncode == 0:
                found[minor] = done.stdout.strip()
                break
    return found


def floors(projects: list[Path]) -> dict[str, str]:
    """Return the lowest version of each library that all packages together accept, with their extras."""
    highest: dict[str, str] = {}
    for project in projects:
        content = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = content.get("optional-dependencies", {}).values()
        for requirement in chain(content.get("dependencies", []), *extras):
            match = _FLOOR.match(requirement)
            if match is None or match[1].startswith("accel"):
                continue
            if match[1] not in highest or _number(match[2]) > _number(highest[match[1]]):
                highest[match[1]] = match[2]
    return dict(sorted(highest.items()))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's report in JUnit's format."""
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}


def with_row(page: str, row: list[str]) -> str:
    """Return the page with a row of the table, which replaces that of the same versions, Python and tests.

    Raises:
        SystemExit: the page has no place for the table.
    """
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        raise SystemExit(f"the page has no lines {BEGIN} and {END}, between which the table is written")
    old = page[begin + len(BEGIN) : end].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in old]
    rows = [*(other for other in rows if (*other[:2], other[3]) != (*row[:2], row[3])), row]
    table = "\n".join([_HEAD, *(f"| {' | '.join(cells)} |" for cells in sorted(rows))])
    return f"{page[: begin + len(BEGIN)]}\n\n{table}\n\n{page[end:]}"


def main() -> None:
    """Answer one question of scripts/test-versions."""
    parser = argparse.ArgumentParser(prog="scripts/version_environments.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("floors", help="print the lowest declared versions, as constraints of pip")
    python = commands.add_parser("python", help="print the path of the lowest or newest Python")
    python.add_argument("which", choices=("lowest", "newest"))
    row = commands.add_parser("row", help="write a row of the table")
    row.add_argument("versions")
    row.add_argument("tests", help="which tests ran")
    row.add_argument("report", type=Path, help="pytest's report in JUnit's format")
    arguments = parser.parse_args()
    if arguments.command == "floors":
        # accel-megatron is tested with the one Megatron-core that it requires: scripts/test-megatron.
        projects = sorted((ROOT / "packages").glob("*/pyproject.toml"))
        for name, version in floors([file for file in projects if file.parent.name != "accel-megatron"]).items():
            print(f"{name}=={version}")
    elif arguments.command == "python":
        found = interpreters()
        if not found:
            parser.error("no Python from 3.10 to 3.14 was found")
        print(found[min(found) if arguments.which == "lowest" else max(found)])
    else:
        import torch

        numbers = counts(arguments.report)
        python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
        cells = [arguments.versions, python_version, torch.__version__.partition("+")[0], arguments.tests]
        cells += [f"{numbers[name]:,}" for name in ("passed", "failed", "skipped")]
        PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), cells), encoding="utf-8")


if __name__ == "__main__":
    main()
