"""The program that runs the script of a rank: it is as Python would be, and starts as fast."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_launch.entrypoint import WORKER

SCRIPT = """
import os
import sys
names = ("__name__", "__file__", "__package__", "__spec__", "__cached__", "__doc__")
found = [globals().get(name) for name in names] + [type(__loader__).__name__, __loader__.path]
modules = sorted(name for name in sys.modules if name not in ("__future__", "_ctypes", "atexit"))
print([*found, sys.argv, sys.path, sys.flags, sys.flags.optimize, __debug__, modules])
"""

DEATH_SIGNAL = """
import _ctypes, os, sys
if sys.argv[1] == "without":
    del _ctypes.call_function
from accel_launch.elastic.worker import die_with_launcher
die_with_launcher(os.getppid())
import ctypes
found = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(found))
print(found.value)
"""


def _output(words: Sequence[str], folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**environment, **variables}, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize("option", ["-u", "-I", "-S", "-E", "-O", "-B"])
def test_a_rank_differs_from_python_in_three_modules(tmp_path: Path, option: str) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    script = str(tmp_path / "s.py")
    expected = _output([option, script, "a b"], tmp_path)
    assert _output([option, str(WORKER), "script", str(os.getpid()), script, "a b"], tmp_path) == expected


def test_a_rank_runs_cached_bytecode(tmp_path: Path) -> None:
    """Python compiles the file that it is started with each time, which took 4 of the 9 ms of a rank's start."""
    for name in ("worker.py", "start_worker.py"):
        (tmp_path / name).write_bytes(WORKER.with_name(name).read_bytes())
    (tmp_path / "s.py").write_text("print('script')")
    words = [str(tmp_path / "start_worker.py"), "script", str(os.getpid()), "s.py"]
    assert _output(words, tmp_path) == "script\n"
    (cached,) = (tmp_path / "__pycache__").glob("worker.*.pyc")
    (tmp_path / "other.py").write_text("print('cached', __name__, __file__)")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / "other.py"), str(cached), invalidation_mode=unchecked)
    assert _output(words, tmp_path) == f"cached __main__ {tmp_path / 'worker.py'}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sends this signal")
@pytest.mark.parametrize("call", ["with", "without"])
def test_the_signal_that_follows_the_launchers_death_is_set(tmp_path: Path, call: str) -> None:
    assert _output(["-c", DEATH_SIGNAL, call], tmp_path) == "15\n"
