"""The wheels, installed into fresh environments: each package works with only its own dependencies there.

The whole file takes minutes: it installs torch once, as a user's pip would, and runs the packages' own tests from the
wheels.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from workspace import ROOT, import_name, metadata, projects

# The first to come builds the wheels.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# What pip must find beside a package to run its tests, and nothing of ours.
TEST_TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
SETTINGS = """[pytest]
pythonpath = tests/support
addopts = --import-mode=importlib -p no:cacheprovider
markers =
    slow
    gpu
timeout = 120
"""
# As in the conftest.py of the workspace, which is not there.
PROFILE = """
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
providers._get_local_constants = lambda: providers._local_constants
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("suite")
"""


def _run(*command: object, folder: Path, seconds: int = 900, **variables: str) -> str:
    """Standard output of a command; the test fails with all that it said when it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _pip(python: Path, *arguments: object, folder: Path) -> str:
    # The pip of the running environment acts on the other one, which then need not hold a pip of its own.
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    return _run(*pip, *arguments, "--constraint", ROOT / "constraints.txt", folder=folder)


def _empty_environment(folder: Path) -> Path:
    """The Python of a new, empty environment."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def _site_packages(python: Path) -> Path:
    return Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=python.parent).strip()
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    _run("bash", ROOT / "scripts" / "wheels", folder, folder=ROOT, ACCEL_VENV=sys.prefix)
    return folder


@pytest.fixture(scope="module")
def torch_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of an environment with torch and the test tools, and nothing of ours."""
    folder = tmp_path_factory.mktemp("torch")
    python = _empty_environment(folder / "env")
    torch = next(
        line for line in ROOT.joinpath("constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    _pip(python, "install", "-qq", torch, *TEST_TOOLS, folder=folder)
    return _site_packages(python)


@pytest.fixture(scope="module")
def install(wheels: Path, torch_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Install one distribution from the wheels into a fresh environment, and return its Python.

    Torch is 700 MB: these environments see the one of torch_environment rather than have their own.
    """

    @functools.cache
    def install_one(distribution: str) -> Path:
        folder = tmp_path_factory.mktemp(distribution)
        python = _empty_environment(folder / "env")
        _site_packages(python).joinpath("torch.pth").write_text(f"{torch_environment}\n")
        _pip(python, "install", "-qq", "--find-links", wheels, distribution, folder=folder)
        return python

    return install_one


def _ours(python: Path) -> set[str]:
    """The distributions of this workspace that are installed."""
    names = "import importlib.metadata as m, json; print(json.dumps([d.metadata['Name'] for d in m.distributions()]))"
    return set(json.loads(_run(python, "-c", names, folder=python.parent))) & {project.name for project in projects()}


def _chosen(python: Path, wheels: Path, distribution: str, folder: Path) -> dict[str, dict]:
    """What pip would install into an empty environment for a distribution, by name."""
    report = _pip(
        python, "install", "-qq", "--dry-run", "--report", "-", "--find-links", wheels, distribution, folder=folder
    )
    return {entry["metadata"]["name"].lower().replace("_", "-"): entry for entry in json.loads(report)["install"]}


@pytest.mark.parametrize("project", projects(), ids=lambda project: project.name)
def test_wheel_holds_the_package_its_types_and_its_licence(project: Path, wheels: Path) -> None:
    package, version = import_name(project), metadata(project)["version"]
    names = set(zipfile.ZipFile(wheels / f"{package}-{version}-py3-none-any.whl").namelist())
    expected = {
        file.relative_to(project / "src").as_posix()
        for file in (project / "src").rglob("*")
        if file.suffix in {".py", ".pyi", ".typed"}
    }
    in_package = {name for name in names if name.startswith(f"{package}/")}
    assert expected <= in_package
    assert f"{package}/py.typed" in in_package
    assert f"{package}-{version}.dist-info/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {package, f"{package}-{version}.dist-info"}


@pytest.mark.timeout(
    2400
)  # the first to come installs torch and the test tools, and a package's own tests start many processes
@pytest.mark.parametrize(
    ("distribution", "together"),
    [
        ("accel-launch", {"accel-launch", "accel-state"}),
        ("accel-bigmodel", {"accel-bigmodel", "accel-state"}),
        ("accel-data", {"accel-data", "accel-state"}),
        ("accel-quant", {"accel-quant", "accel-bigmodel", "accel-state"}),
        ("accel-track", {"accel-track", "accel-state"}),
        ("accel-fp8", {"accel-fp8", "accel-state"}),
        ("accel", {"accel", "accel-bigmodel", "accel-data", "accel-fp8", "accel-launch", "accel-state", "accel-track"}),
    ],
)
def test_own_tests_pass_with_only_the_own_dependencies(
    distribution: str, together: set[str], install: Callable[[str], Path], tmp_path: Path
) -> None:
    python = install(distribution)
    assert _ours(python) == together
    shutil.copytree(
        ROOT / "packages" / distribution / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "packages" / distribution / "README.md", tmp_path)  # a test runs its examples
    tmp_path.joinpath("pytest.ini").write_text(SETTINGS)
    tmp_path.joinpath("conftest.py").write_text(PROFILE)
    # Slow tests have run from the work tree already; what could differ here is what is installed.
    output = _run(
        python, "-m", "pytest", "-q", "-m", "not slow", "tests", folder=tmp_path, seconds=1800, OMP_NUM_THREADS="1"
    )
    assert re.search(r"\b\d+ passed", output), output


@pytest.mark.timeout(2400)  # may be the one that installs torch
def test_the_command_works_where_only_the_launcher_is_installed(install: Callable[[str], Path], tmp_path: Path) -> None:
    python = install("accel-launch")
    tmp_path.joinpath("script.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    output = _run(
        python.parent / "accel",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "script.py",
        folder=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert sorted(re.findall(r"rank \d of \d", output)) == ["rank 0 of 2", "rank 1 of 2"]


def test_pip_prefers_our_accel_to_the_unrelated_one_of_the_public_index(wheels: Path, tmp_path: Path) -> None:
    python = _empty_environment(tmp_path / "env")
    index = _run(sys.executable, "-m", "pip", "index", "versions", "accel", folder=tmp_path)
    assert "0.3.0" in index.split("Available versions:")[1], (
        "the unrelated accel is gone from the public index: this test has lost its point"
    )
    chosen = _chosen(python, wheels, "accel", tmp_path)
    # accel-quant is an extra.
    ours = {project.name: metadata(project)["version"] for project in projects() if project.name != "accel-quant"}
    assert {name: chosen[name]["metadata"]["version"] for name in ours} == ours
    assert all(chosen[name]["download_info"]["url"].startswith(wheels.as_uri()) for name in ours)


@pytest.mark.parametrize(
    ("distribution", "absent"),
    [
        ("accel-launch", {"accel", "accel-data"}),
        ("accel-data", {"accel", "accel-launch", "pyyaml"}),
        ("accel-bigmodel", {"accel", "accel-data", "accel-launch", "transformers", "bitsandbytes"}),
    ],
)
def test_a_package_brings_only_what_it_needs(distribution: str, absent: set[str], wheels: Path, tmp_path: Path) -> None:
    chosen = _chosen(_empty_environment(tmp_path / "env"), wheels, distribution, tmp_path)
    declared = {re.match(r"[\w-]+", text)[0] for text in metadata(ROOT / "packages" / distribution)["dependencies"]}  # type: ignore[index]
    assert declared | {distribution} <= set(chosen)
    assert not absent & set(chosen)
