"""The changes that scripts/mutate makes, and whether the tests of a changed copy fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutate import drawn, mutations
from workspace import ROOT, environment

SOURCE = '''"""Text."""
def clip(value: int, limit: int = 3) -> int:
    """Text."""
    if not value > limit and limit:
        raise ValueError(f"{value + 1}")
    self.count += 1
    warn(value)
    return value % limit
'''
CHANGES = """
2 value: int, limit: int=3  ->  value: int, limit: int=4
4 not value > limit and limit  ->  not value > limit or limit
4 not value > limit and limit  ->  value > limit and limit
4 value > limit  ->  value >= limit
5 raise ValueError(f'{value + 1}')  ->  (left out)
6 self.count += 1  ->  (left out)
6 self.count += 1  ->  self.count -= 1
6 self.count += 1  ->  self.count += 2
7 warn(value)  ->  (left out)
8 return value % limit  ->  return None
8 value % limit  ->  value * limit
"""
# In an interpreter without threads, for it forks.
RUN = """
import sys
from pathlib import Path
from mutate import run_tests
folder, lasts = Path(sys.argv[1]), "def double(x):\\n    while True: pass\\n"
test = folder / "test_tried.py"
test.write_text("import tried\\ndef test_it(): assert tried.double(3) == 6\\n")
for source in ("def double(x): return 2 * x\\n", "def double(x): return 3 + x - 1\\n", lasts):
    (folder / "tried.py").write_text(source)
    print(run_tests(["--rootdir", str(folder), "-c", "/dev/null", str(test)], folder, 3 if source == lasts else 60))
"""


def _variables() -> dict[str, str]:
    variables = environment()
    variables["PYTHONPATH"] += f":{ROOT / 'scripts'}"
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1"}


def test_each_place_changes_once() -> None:
    changes = list(mutations(SOURCE))
    assert [f"{mutation.line} {mutation.change}" for mutation in changes] == CHANGES.strip().splitlines()
    assert len({mutation.source for mutation in changes}) == len(changes)
    for mutation in changes:
        compile(mutation.source, "changed", "exec")


def test_a_sample_is_drawn_again_with_the_same_seed() -> None:
    changes = list(mutations(SOURCE))
    first = drawn(changes, 4, 0)
    assert first == drawn(changes, 4, 0) != drawn(changes, 4, 1)
    assert len(first) == 4 and [changes.index(change) for change in first] == sorted(map(changes.index, first))
    assert drawn(changes, None, 0) == drawn(changes, 99, 0) == changes


@pytest.mark.slow  # three runs of pytest; what is changed is fast
def test_a_changed_copy_fails_and_an_endless_one_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=_variables(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"], (tmp_path / "log").read_text()


def test_an_unknown_module_is_an_error() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), "accel_data.no_such"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "accel_data.no_such is not a module" in done.stderr


ENDLESS = """
import os, pathlib, time
def test_it():
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(100)
"""
STOPPED = """
import sys
from pathlib import Path
from mutate import run_tests
folder = Path(sys.argv[1])
run_tests(["--rootdir", str(folder), "-c", "/dev/null", str(folder / "test_endless.py")], folder, 60)
"""


def test_tests_end_when_the_script_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_endless.py").write_text(ENDLESS)
    variables = _variables()
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], env=variables, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
