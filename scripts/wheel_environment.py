"""Fresh environments for wheels, which show torch without installing it, and the tests that run from a wheel."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

# Test dependencies of a package.
TEST_TOOLS = ["pytest", "pytest-timeout", "hypothesis"]
# The tests/ of the workspace have what those of several packages share.
SETTINGS = f"""[pytest]
pythonpath = tests/support "{ROOT / "tests"}"
addopts = --import-mode=importlib -p no:cacheprovider
markers =
    slow
    timing
    gpu
timeout = 600
"""
# As in the conftest.py of the workspace, which is not installed with a wheel.
PROFILE = """
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
providers._get_local_constants = lambda: providers._local_constants
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("suite")
"""

# Some tests of what a user of one package calls; the rest has run from the work tree.
PUBLIC_SURFACE = {
    "accel-state": ["test_state.py", "test_nested.py"],
    "accel-launch": ["test_cli.py", "test_single.py"],
    "accel-bigmodel": ["test_loading.py"],
    "accel-checkpoint": ["test_api.py"],
    "accel-data": ["test_loader.py"],
    "accel-quant": ["test_loading.py"],
    "accel-megatron": ["test_plugin.py", "test_redirection.py"],
    "accel-track": ["test_tracking.py", "test_jsonl.py"],
    "accel-fp8": ["test_native_layers.py"],
    "accel-monitor": ["test_attach.py", "test_ledger.py"],
    "accel": ["test_facade.py", "test_saving.py"],
}


def empty_environment(folder: Path) -> Path:
    """Return the Python of a new, empty environment."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    """Return where an environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def _with_requirements(distribution: str) -> set[str]:
    """Return a distribution of the running environment and everything that it requires there, by normalised name."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def linked(distributions: list[str], folder: Path) -> Path:
    """Links to distributions of the running environment and to everything that they require."""
    for name in set().union(*map(_with_requirements, distributions)):
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source, target = Path(str(distribution.locate_file(entry))), folder / entry
            if not target.exists():
                target.symlink_to(source)
    return folder


def public_surface(python: Path, project: Path, folder: Path, tools: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the tests of a package's public surface from a folder, and its variables.

    Args:
        python: of an environment with the wheel.
        project: the package; its tests are copied.
        folder: an empty one, where the command is to run.
        tools: a directory that shows ``TEST_TOOLS``.
    """
    shutil.copytree(project / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    folder.joinpath("pytest.ini").write_text(SETTINGS)
    folder.joinpath("conftest.py").write_text(PROFILE)
    files = [f"tests/{name}" for name in PUBLIC_SURFACE[project.name]]
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not timing", *files]
    return command, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tools)}
