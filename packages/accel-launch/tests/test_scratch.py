"""Directories for temporary files of launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accel_launch.scratch import scratch_directory

HOLDER = """
from accel_launch.scratch import scratch_directory
with scratch_directory() as directory:
    (directory / "secret").write_text("of a run")
    print(directory, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER], text=True, env=environment, **pipes)  # type: ignore[call-overload]
    return process, Path(process.stdout.readline().strip())


def test_the_directory_of_a_killed_launcher_is_removed_by_the_next_one(temporary: Path) -> None:
    killed, left = _holder(temporary)
    living, used = _holder(temporary)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    foreign = temporary / "accel_launch_of_something_else"
    foreign.mkdir()
    outside = temporary.parent / "outside"
    outside.mkdir()
    (outside / "owner.lock").touch()
    (temporary / "accel_launch_link").symlink_to(outside)
    assert (left / "secret").exists()
    with scratch_directory() as own:
        assert not left.exists() and own.is_dir()
        # One in use, one that is not known, and what a link leads to.
        assert (used / "secret").exists() and foreign.is_dir() and (outside / "owner.lock").exists()
    assert not own.exists()
    living.communicate("\n")
    assert living.returncode == 0 and not used.exists()


def test_what_the_launcher_starts_does_not_keep_its_directory(temporary: Path) -> None:
    """Otherwise a rank that outlives its launcher would."""
    with scratch_directory() as own:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        names = [os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")]
        child.communicate(b"\n")
        assert own.is_dir() and not [name for name in names if name.startswith(str(own))]
