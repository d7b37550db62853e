"""`python -m accel_compat enable`, `disable` and `status` in an environment of their own, and `--as-accelerate`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from accel_compat import COVERED_VERSION


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that sees the packages of this one, as a user's does after pip install."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    paths = [sysconfig.get_path("purelib"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    paths += [path for path in sys.path if path.endswith("src")]
    made = folder / "bin" / "python"
    site_packages(made).joinpath("all.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    return made


def site_packages(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def run(python: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **variables},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return (done.stdout + done.stderr).strip()


def contents(python: Path) -> dict[str, str]:
    """Every file of an environment, with its digest and permissions."""
    root = python.parent.parent
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(root)): f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    }


PRINT = (
    "import accelerate, importlib.metadata as m;"
    "print(accelerate.__version__, m.version('accelerate'), accelerate.Accelerator)"
)


def test_enable_and_disable_leave_the_environment_as_it_was(python: Path) -> None:
    before = contents(python)
    run(python, "-c", "import accelerate", code=1)
    assert run(python, "-m", "accel_compat", "status").startswith("disabled: no `accelerate` in")
    enabled = run(python, "-m", "accel_compat", "enable")
    assert enabled.count("wrote ") == 2 and "enabled: `import accelerate` gives accel" in enabled
    expected = f"{COVERED_VERSION} {COVERED_VERSION} <class 'accel_compat.accelerator.Accelerator'>"
    assert run(python, "-c", PRINT) == expected
    assert run(python.with_name("accelerate"), "launch", "--help").startswith("usage: accel launch")
    assert "wrote" not in run(python, "-m", "accel_compat", "enable")  # a second time
    disabled = run(python, "-m", "accel_compat", "disable")
    assert disabled.count("removed ") == 2 and "disabled: no `accelerate`" in disabled
    assert contents(python) == before
    assert "removed" not in run(python, "-m", "accel_compat", "disable")


def test_enable_refuses_beside_the_real_one(python: Path) -> None:
    real = site_packages(python) / "accelerate-0.99.dist-info"
    real.mkdir()
    real.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.99\n")
    try:
        before = contents(python)
        refused = run(python, "-m", "accel_compat", "enable", code=1)
        assert "Accelerate 0.99 is installed in" in refused and "-m pip uninstall accelerate" in refused
        assert run(python, "-m", "accel_compat", "status").startswith("disabled: Accelerate 0.99 is installed in")
        assert contents(python) == before
    finally:
        real.joinpath("METADATA").unlink()
        real.rmdir()


def test_enable_refuses_to_overwrite_a_command(python: Path) -> None:
    command = python.with_name("accelerate")
    command.write_text("#!/bin/sh\n")
    try:
        assert f"{command} exists, and accel_compat has not written it" in run(
            python, "-m", "accel_compat", "enable", code=1
        )
    finally:
        command.unlink()


@pytest.mark.slow  # starts five interpreters that import torch; enabling has fast tests
def test_launch_as_accelerate_changes_one_run(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    child = f"subprocess.run([sys.executable, '-c', {PRINT!r}], check=True)"
    script.write_text(f"import subprocess, sys\n{PRINT}\n{child}\n")
    before = contents(python)
    expected = [f"{COVERED_VERSION} {COVERED_VERSION} <class 'accel_compat.accelerator.Accelerator'>"] * 2
    launch = ("-m", "accel.commands.launch", "--cpu", "--quiet", "--num_processes", "1")
    assert run(python, *launch, "--as-accelerate", str(script)).splitlines() == expected
    assert run(python, *launch, str(script), ACCEL_COMPAT="1").splitlines() == expected
    assert "No module named 'accelerate'" in run(python, *launch, str(script), code=1)
    assert contents(python) == before
