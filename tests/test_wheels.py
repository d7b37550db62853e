"""The wheels, installed into fresh environments: each package works with only its own dependencies.

The fast tier checks what every wheel holds, installs one alone, imports its modules and runs its README's examples.
`scripts/test --all` does so with each, and runs the tests of its public surface against the installed wheel.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from wheel_environment import PUBLIC_SURFACE, TEST_TOOLS, empty_environment, linked, public_surface, site_packages
from workspace import ROOT, import_name, metadata, module_name, projects, sources

# The first test builds the wheels; each installation asks the package index, as a user's pip does.
pytestmark = pytest.mark.timeout(900)

# Follows the README's examples in the same process: they must not find what only this has imported.
IMPORT_MODULES = """
import importlib, json
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
"""
# What `pip install accel` brings; the others are extras.
_EXTRAS = {"accel-quant", "accel-compat", "accel-megatron", "accel-monitor", "accel-plan"}
BASE = {project.name for project in projects()} - _EXTRAS
# The siblings that each package installs, its optional ones left out.
TOGETHER = {
    "accel-state": {"accel-state"},
    "accel-launch": {"accel-launch", "accel-state"},
    "accel-bigmodel": {"accel-bigmodel", "accel-state"},
    "accel-checkpoint": {"accel-checkpoint", "accel-state"},
    "accel-data": {"accel-data", "accel-state"},
    "accel-quant": {"accel-quant", "accel-bigmodel", "accel-state"},
    "accel-track": {"accel-track", "accel-state"},
    "accel-fp8": {"accel-fp8", "accel-state"},
    "accel-monitor": {"accel-monitor", "accel-state"},
    "accel": BASE,
    "accel-plan": BASE | {"accel-plan"},
    "accel-compat": BASE | {"accel-compat"},
    "accel-megatron": BASE | {"accel-megatron"},
}
each_distribution = pytest.mark.parametrize("distribution", TOGETHER)


def _run(*command: object, folder: Path, seconds: int = 600, **variables: str) -> str:
    """Standard output of a command; on failure the test fails with the full output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _pip(python: Path, *arguments: object, folder: Path) -> str:
    # The pip of the running environment acts on the other one, which then needs no pip of its own.
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    # A run with another torch (scripts/test --torch) has its own constraints.
    constraints = ROOT / os.environ.get("ACCEL_CONSTRAINTS", "constraints.txt")
    return _run(*pip, *arguments, *(["--constraint", constraints] if "install" in arguments else []), folder=folder)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    _run("bash", ROOT / "scripts" / "wheels", folder, folder=ROOT, ACCEL_VENV=sys.prefix)
    return folder


@pytest.fixture(scope="module")
def torch_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that shows torch and its requirements of the running environment, and nothing else.

    Torch is 700 MB or more; installing it once per package would dominate the suite.
    """
    return linked(["torch"], tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that shows what runs the tests, in the same way."""
    return linked(TEST_TOOLS, tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def install(wheels: Path, torch_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Install one distribution from the wheels into a fresh environment that has torch, and return its Python."""

    @functools.cache
    def install_one(distribution: str) -> Path:
        folder = tmp_path_factory.mktemp(distribution)
        python = empty_environment(folder / "env")
        site_packages(python).joinpath("torch.pth").write_text(f"{torch_only}\n")
        folder.joinpath("dist").symlink_to(wheels)
        _pip(python, "install", "-qq", "--no-compile", *_shown_first(_readme(distribution)), folder=folder)
        return python

    return install_one


def _readme(distribution: str) -> Path:
    return ROOT / "packages" / distribution / "README.md"


def _shown_first(page: Path) -> list[str]:
    """The arguments of the first ``pip install`` that a page shows."""
    command = re.search(r"pip install (.*)", page.read_text(encoding="utf-8"))
    assert command is not None, page
    return shlex.split(command[1], comments=True)


def _chosen(python: Path, wheels: Path, distribution: str, folder: Path) -> dict[str, dict]:
    """What pip would install into an empty environment for a distribution, by name."""
    arguments = ["install", "-qq", "--dry-run", "--report", "-", "--find-links", wheels, distribution]
    report = _pip(python, *arguments, folder=folder)
    return {
        entry["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): entry
        for entry in json.loads(report)["install"]
    }


def test_every_distribution_is_installed_alone() -> None:
    assert set(TOGETHER) == {project.name for project in projects()}


def test_no_page_installs_the_unrelated_accel_of_the_public_index() -> None:
    shown = {
        page: "accel" for page in (ROOT / "README.md", ROOT / "docs" / "install.md", ROOT / "docs" / "quickstart.md")
    }
    for name in TOGETHER:
        shown |= {_readme(name): name, ROOT / "docs" / "packages" / f"{name}.md": name}
    for page, name in shown.items():
        assert _shown_first(page) == ["--find-links", "dist", f"{name}>=1.0"], page
        assert "scripts/wheels" in page.read_text(encoding="utf-8"), page
    for page in (*shown, *ROOT.glob("examples/*.*"), *ROOT.glob("docs/*/*.md")):
        text = page.read_text(encoding="utf-8")
        for words in re.findall(r"pip install ([^`#\n]*)", text):
            without_version = re.findall(r"(?:^|\s)['\"]?(accel(?:-\w+)?(?:\[[\w,]+\])?)['\"]?(?=\s|$)", words)
            assert not without_version, (page, words)
            # The page about installing has all commands below the one line that makes the option unnecessary.
            finds_wheels = "--find-links dist" in words or "PIP_FIND_LINKS" in text
            assert finds_wheels or ">=1.0" not in words, (page, words)


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


# One that users install alone is in the fast tier; each of the others takes some seconds more. The gate has them all.
@pytest.mark.parametrize(
    "distribution",
    [name if name == "accel-launch" else pytest.param(name, marks=pytest.mark.slow) for name in TOGETHER],
)
def test_each_wheel_works_alone(distribution: str, install: Callable[[str], Path], tmp_path: Path) -> None:
    python, project = install(distribution), ROOT / "packages" / distribution
    code = "import importlib.metadata as m, json; print(json.dumps([d.metadata['Name'] for d in m.distributions()]))"
    installed = set(json.loads(_run(python, "-c", code, folder=tmp_path)))
    assert installed & {project.name for project in projects()} == TOGETHER[distribution]
    _pip(python, "check", folder=tmp_path)
    modules = [module_name(project, file) for file in sources(project) if file.name != "__main__.py"]
    script = (ROOT / "tests" / "readme_examples.py").read_text(encoding="utf-8") + IMPORT_MODULES
    _run(python, "-c", script, project / "README.md", json.dumps(modules), folder=tmp_path, OMP_NUM_THREADS="1")


@pytest.mark.slow  # runs several suites a second time
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("distribution", PUBLIC_SURFACE)
def test_the_public_surface_works_from_the_wheel(
    distribution: str, install: Callable[[str], Path], tools: Path, tmp_path: Path
) -> None:
    python = install(distribution)
    command, variables = public_surface(python, ROOT / "packages" / distribution, tmp_path, tools)
    output = _run(*command, folder=tmp_path, seconds=1500, **variables)
    assert re.search(r"\b\d+ passed", output), output


@pytest.mark.slow  # installs the launcher, which the gate does in its part "wheels"
def test_the_command_works_where_only_the_launcher_is_installed(install: Callable[[str], Path], tmp_path: Path) -> None:
    python = install("accel-launch")
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    tmp_path.joinpath("script.py").write_text(script)
    command = [python.parent / "accel", "launch", "--cpu", "--num_processes", "2", "script.py"]
    output = _run(*command, folder=tmp_path, OMP_NUM_THREADS="1")
    assert sorted(re.findall(r"rank \d of \d", output)) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.slow  # resolves the whole set on the package index
def test_pip_prefers_our_accel_to_the_unrelated_one_of_the_public_index(wheels: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "env")
    index = _run(sys.executable, "-m", "pip", "index", "versions", "accel", folder=tmp_path)
    assert "0.3.0" in index.split("Available versions:")[1], (
        "the unrelated accel is gone from the public index: this test has lost its point"
    )
    chosen = _chosen(python, wheels, "accel", tmp_path)
    ours = {project.name: metadata(project)["version"] for project in projects() if project.name in BASE}
    assert {name: chosen[name]["metadata"]["version"] for name in ours} == ours
    assert all(chosen[name]["download_info"]["url"].startswith(wheels.as_uri()) for name in ours)


@pytest.mark.slow  # resolves on the package index, torch included
@pytest.mark.parametrize(
    ("distribution", "absent"),
    [
        ("accel-launch", {"accel", "accel-data"}),
        ("accel-data", {"accel", "accel-launch", "pyyaml"}),
        ("accel-bigmodel", {"accel", "accel-data", "accel-launch", "transformers", "bitsandbytes"}),
    ],
)
def test_a_package_brings_only_what_it_needs(distribution: str, absent: set[str], wheels: Path, tmp_path: Path) -> None:
    chosen = _chosen(empty_environment(tmp_path / "env"), wheels, distribution, tmp_path)
    requirements = metadata(ROOT / "packages" / distribution)["dependencies"]
    declared = {Requirement(text).name.replace(".", "-") for text in requirements}
    assert declared | {distribution} <= set(chosen)
    assert not absent & set(chosen)
