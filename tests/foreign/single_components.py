"""Each component's wheel alone in a new environment, used by foreign code: see ``scripts/test-components``."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import table

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))

from wheel_environment import empty_environment, linked, site_packages  # noqa: E402


@dataclass(frozen=True)
class Component:
    """A distribution, what is installed next to it, and the programs that use it."""

    program: str  # a file of this folder, run as it is
    foreign: tuple[str, ...] = ()  # distributions of other people that are installed afterwards
    slow: tuple[str, ...] = ()  # those that --quick leaves out
    starts: bool = False  # run the program with nothing else installed, and starts.py with the rest
    also: tuple[str, ...] = ()  # wheels of siblings that starts.py needs too
    shown: tuple[str, ...] = ()  # like torch, from the environment of the tests, if it has them


# Ways to start ranks need accel-data for the loader, and accel-launch for the way that the others are compared with.
COMPONENTS = {
    "accel-state": Component(
        "state_program.py",
        ("mpi4py", "joblib", "nbclient", "ipykernel"),
        ("lightning", "ray[train]"),
        starts=True,
        also=("accel-data", "accel-launch"),
        shown=("deepspeed",),
    ),
    "accel-launch": Component("launch_program.py"),
    "accel-data": Component("data_program.py", ("webdataset", "torchdata"), ("datasets",)),
    "accel-bigmodel": Component("bigmodel_program.py"),
    "accel-track": Component("track_program.py"),
    "accel-checkpoint": Component("checkpoint_program.py"),
    "accel-fp8": Component("fp8_program.py"),
    "accel-monitor": Component("monitor_program.py"),
    "accel-quant": Component("quant_program.py", ("transformers",)),
    "accel-compat": Component("compat_program.py", ("transformers",)),
    "accel-plan": Component("plan_program.py", ("transformers",)),
}


def run(*command: object, seconds: float = 900, folder: Path | None = None) -> str:
    """Standard output of a command; raises SystemExit with all of its output if it fails."""
    hidden = ("PYTHONPATH", "ACCEL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def pip(python: Path, *words: object) -> str:
    """pip of this environment, for another one."""
    return run(sys.executable, "-m", "pip", "--python", python, *words, "--disable-pip-version-check", "-q")


def installed(python: Path) -> dict[str, str]:
    """Versions by distribution, of those in the environment itself."""
    code = (
        "import importlib.metadata as m, json, sysconfig\n"
        "found = m.distributions(path=[sysconfig.get_path('purelib')])\n"
        "print(json.dumps({d.name: d.version for d in found}))"
    )
    versions: dict[str, str] = json.loads(run(python, "-c", code))
    return versions


def megabytes(folder: Path) -> float:
    """The size of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


STARTED = "two ranks started in {} ways, which the next table names: equal"
QUICK = ("accel-state", "accel-launch", "accel-data", "accel-bigmodel", "accel-track")
"""Those of ``--quick``; an environment takes half a minute on two cores."""


def check(name: str, wheels: Path, quick: bool) -> tuple[str, str]:
    """Install and use one component; returns its row of the table, and the table of ways to start ranks if it ran."""
    component = COMPONENTS[name]
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as text:
        folder = Path(text)
        python = empty_environment(folder / "venv")
        packages = site_packages(python)
        # torch and what it requires, as a user has them already.
        shown = linked(["torch"], _made(folder / "torch"))
        (packages / "torch.pth").write_text(f"{shown}\n")
        pip(python, "install", "--find-links", wheels, name)
        size, alone = megabytes(packages), installed(python)
        foreign = component.foreign + (() if quick else component.slow)
        started = time.monotonic()
        printed = run(python, HERE / component.program, folder=folder) if component.starts else ""
        linked([*filter(find_spec, component.shown)], shown)
        if component.also or foreign:
            pip(python, "install", "--find-links", wheels, *component.also, *foreign)
        versions = installed(python)
        ways = run(python, HERE / "starts.py", folder=folder) if component.starts else ""
        printed = printed or run(python, HERE / component.program, folder=folder)
        seconds = time.monotonic() - started
    if ways:
        equal = sum(result == "equal" for _, result in table.cells(ways, table.START_HEAD).values())
        printed += STARTED.format(equal)
    used = ", ".join(f"{other} {versions[other]}" for other in map(_plain_name, foreign) if other in versions)
    print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    ran = "; ".join(printed.splitlines())
    return f"| {name} | {size:.1f} MB | {len(alone)}: {', '.join(sorted(alone))} | {ran} | {used} |", ways


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _plain_name(requirement: str) -> str:
    return re.split(r"[\[=<>]", requirement)[0]


def main() -> None:
    """Check the components, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("components", nargs="*", help=f"of {', '.join(COMPONENTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="without what takes long to install")
    parser.add_argument("--summary", type=Path, help="file for the table")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.components) - set(COMPONENTS))
    if unknown:
        raise SystemExit(f"unknown components {unknown}; there are {', '.join(COMPONENTS)}")
    with tempfile.TemporaryDirectory(prefix="wheels-") as text:
        wheels = Path(text)
        # accel itself, which accel-plan and accel-compat require; tests/test_wheels.py tests it.
        projects = [ROOT / "packages" / name for name in (*COMPONENTS, "accel")]
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, *projects)
        chosen = arguments.components or (QUICK if arguments.quick else COMPONENTS)
        rows, starts = zip(*(check(name, wheels, arguments.quick) for name in chosen), strict=True)
    printed = "\n".join([table.COMPONENT_HEAD, "| --- | --- | --- | --- | --- |", *rows, "", *filter(None, starts)])
    print(printed)
    if arguments.summary:
        arguments.summary.write_text(printed + "\n", encoding="utf-8")
    stale = list(table.differences(printed, table.PAGE.read_text(encoding="utf-8"), arguments.quick))
    if stale:
        raise SystemExit("docs/install.md says otherwise; copy the rows:\n" + "\n".join(stale))


if __name__ == "__main__":
    main()
