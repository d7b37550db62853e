"""Run the test suites of client libraries on accel and on the reference, and compare which tests pass.

    python tests/clients/suites/run_suites.py --reference PYTHON [--only PATTERN] [--summary FILE]

Started by `scripts/test-clients --suites`, which makes the environments. The suites come from the source distributions
of the package index, at the versions that are installed, and run offline with the stand-ins of stand_ins.py. Both
libraries run a suite at the same time, each in a copy of its own. A test with another outcome runs again, alone, under
both: some depend on random numbers or on what ran before.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import run  # noqa: E402

COLUMNS = ("suite", "version", "tests", "pass with both", "skipped by both", "fail with both", "differ")
# Without the options of the suite itself, among them coverage, and errors for warnings of newer libraries.
OPTIONS = (
    *("-q", "-o", "addopts=", "-o", "filterwarnings=", "-o", "junit_family=xunit1"),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
)
Outcomes = dict[str, str]  # passed, skipped, or failed with the type of the exception, by the id of a test


@dataclass(frozen=True)
class Suite:
    """Tests of a source distribution.

    Attributes:
        name: of the distribution.
        tests: files and directories below its root.
        missing: files that the tests import and that the distribution lacks.
        plugins: of pytest, in this directory.
        known: tests that pass with one library only, as patterns, and why.
    """

    name: str
    tests: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    known: dict[str, str] = field(default_factory=dict)


SUITES = (
    Suite(
        "setfit",
        ("tests",),
        {"tests/utils.py": "from tempfile import TemporaryDirectory as SafeTemporaryDirectory\n"},
    ),
    Suite("compressed-tensors", ("tests/test_offload",)),
    Suite(
        "peft",
        tuple(
            f"tests/test_{name}.py"
            for name in (
                *("auto", "cpt", "helpers", "integrations", "loraplus", "lorafa"),
                *("low_level_api", "mapping", "mixed", "vera", "xlora"),
            )
        ),
        {"tests/__init__.py": ""},
        ("peft_offline",),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", required=True, help="the Python of the environment with Accelerate 1.15")
    parser.add_argument("--only", default="*", help="comma-separated patterns of suites")
    parser.add_argument("--seconds", type=int, default=1800, help="a suite that takes longer than this is ended")
    parser.add_argument("--summary", type=Path, help="the page with the table, or a file for it")
    arguments = parser.parse_args()
    suites = [suite for suite in SUITES if run.fits(suite.name, arguments.only)]
    lines, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder) / "hub"
        environment = {
            **os.environ,
            **run.VARIABLES,
            "PYTHONPATH": str(HERE),
            "HF_HUB_CACHE": str(hub),
            "HF_HOME": folder,
        }
        subprocess.run([sys.executable, HERE / "stand_ins.py"], env=environment, check=True, capture_output=True)
        for suite in suites:
            begin = time.monotonic()
            ours, theirs = outcomes(
                suite, arguments.reference, Path(folder) / suite.name, environment, arguments.seconds
            )
            different = report(suite, ours, theirs)
            wrong += len(different)
            lines.append(row(suite, ours, theirs))
            print(f"{lines[-1]} ({(time.monotonic() - begin) / 60:.1f} minutes)", flush=True)
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *lines])
    print(f"\n{table}\n{wrong} tests with another outcome that nothing explains")
    if arguments.summary and len(suites) == len(SUITES) and not wrong:
        run.write_table(arguments.summary, table, "--suites")
    return 1 if wrong or not suites else 0


def outcomes(
    suite: Suite, reference: str, folder: Path, environment: dict[str, str], seconds: int
) -> tuple[Outcomes, Outcomes]:
    """The outcomes of the tests of a suite on accel and on the reference; of those that differ, when run alone."""
    pythons = (sys.executable, reference)
    source = unpack(suite, folder)
    copies = [shutil.copytree(source, folder / str(index)) for index in range(len(pythons))]
    plugins = " ".join(f"-p {name}" for name in suite.plugins)
    test = partial(run_tests, environment={**environment, "PYTEST_ADDOPTS": plugins}, seconds=seconds)
    with ThreadPoolExecutor(len(pythons)) as threads:
        ours, theirs = threads.map(partial(test, suite.tests), pythons, copies)
        if not ours or not theirs:
            raise SystemExit(f"{suite.name}: no test ran with {'accel' if not ours else 'the reference'}")
        again = tuple(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if again:
            for found, alone in zip((ours, theirs), threads.map(partial(test, again), pythons, copies), strict=True):
                found.update(alone)
    return ours, theirs


def unpack(suite: Suite, folder: Path) -> Path:
    """Download the source distribution, and add what it lacks."""
    requirement = f"{suite.name}=={version(suite.name)}"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-binary", ":all:", "--dest", folder, requirement], check=True)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    root = next((folder / "source").iterdir())
    for name, text in suite.missing.items():
        (root / name).write_text(text, encoding="utf-8")
    return root


def run_tests(tests: tuple[str, ...], python: str, root: Path, environment: dict[str, str], seconds: int) -> Outcomes:
    """Run tests of a suite in a process of their own."""
    results = root / "results.xml"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", *OPTIONS, "--continue-on-collection-errors", "--timeout=120", *tests]
    done = subprocess.run(
        [*command, f"--junitxml={results}"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if not results.exists():
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return {}
    return dict(outcome(case) for case in ElementTree.parse(results).iter("testcase"))


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """The id of a test, as pytest takes it, and its outcome; of a failure, the type of the exception."""
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).split(".")
    kinds = {child.tag: child.get("message", "") for child in case}
    result = "skipped" if "skipped" in kinds else "passed"
    for kind in kinds.keys() & {"failure", "error"}:
        # The message of an assert that compares numbers begins with "assert", without the type.
        error = re.match(r"[\w.]+", kinds[kind].replace("assert ", "AssertionError: ", 1))
        result = f"failed {error.group() if error else kind}"
    return "::".join(filter(None, (file or case.get("classname", ""), *classes, name))), result


def report(suite: Suite, ours: Outcomes, theirs: Outcomes) -> list[str]:
    """Print the tests whose outcomes differ; those that nothing explains are returned."""
    unexplained = []
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) == theirs.get(name):
            continue
        why = next((why for pattern, why in suite.known.items() if fnmatch.fnmatch(name, pattern)), "")
        print(f"{'' if why else 'WRONG: '}{name}: {ours.get(name)}, the reference {theirs.get(name)} {why}", flush=True)
        unexplained += [] if why else [name]
    return unexplained


def row(suite: Suite, ours: Outcomes, theirs: Outcomes) -> str:
    """The row of a suite in the table."""
    alike = Counter(ours[name].partition(" ")[0] for name in ours if ours[name] == theirs.get(name))
    total = len(ours.keys() | theirs.keys())
    cells = (suite.name, version(suite.name), total, alike["passed"], alike["skipped"], alike["failed"])
    return f"| {' | '.join(map(str, (*cells, total - alike.total())))} |"


if __name__ == "__main__":
    raise SystemExit(main())
