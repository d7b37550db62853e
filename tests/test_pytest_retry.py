"""What the gate makes of a failing test: the order, the tiers, the limits of time, and the second run alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workspace import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]

# Fails where nothing has failed before it, and passes from then on.
ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_once(number):
    mark = Path(__file__).with_name(f"mark{{number}}")
    first = not mark.exists()
    mark.touch()
    print("this was said", number)
    assert not first, "only the first time"
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run tests of a new folder, with the conftest.py of the workspace, through the script that the gate uses."""
    (tmp_path / "conftest.py").write_text(ROOT.joinpath("conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    markers = "\n".join(f"    {name}" for name in ("slow", "timing", "component"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -ra\ntimeout = 60\nmarkers =\n{markers}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL_", "PYTEST"))}

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "pytest_retry.py"), *arguments],
            cwd=tmp_path,
            env={**clean, **variables},
            capture_output=True,
            text=True,
        )

    return start


def _write(folder: Path, text: str, name: str = "test_it.py") -> None:
    (folder / name).write_text(text, encoding="utf-8")


def test_a_test_that_passes_alone_is_listed_and_only_others_fail_the_run(run: Run, tmp_path: Path) -> None:
    _write(tmp_path, ONCE.format(count=5))
    done = run("-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout
    listed = done.stdout.split("passed when run alone: 5", 1)[1]
    assert listed.count("only the first time") >= 5 and "this was said 3" in listed
    assert "passed when run alone: test_it.py::test_once[4]" in listed
    _write(tmp_path, "def test_wrong():\n    assert 1 == 2\n", "test_wrong.py")
    (tmp_path / "mark0").unlink()
    done = run()
    assert done.returncode == 1 and "passed when run alone: 1" in done.stdout
    assert done.stdout.split("failed again when run alone:", 1)[1].split() == ["test_wrong.py::test_wrong"]


@pytest.mark.slow  # as those below: each run of pytest takes a second
def test_more_than_five_fail_the_run(run: Run, tmp_path: Path) -> None:
    _write(tmp_path, ONCE.format(count=6))
    done = run("-n", "2", "--dist", "loadfile")
    assert done.returncode == 1 and "at most 5 may" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\ndef test_dies():\n    os._exit(3)\n",
        "import missing_module\ndef test_it(): pass\n",
        "import pytest\n@pytest.fixture\ndef broken(): raise ValueError\ndef test_it(broken): pass\n",
        "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    raise ValueError\ndef test_it(broken): pass\n",
    ],
    ids=["process ends", "import", "set-up", "teardown"],
)
def test_a_failure_outside_a_test_fails_the_run_too(run: Run, tmp_path: Path, code: str) -> None:
    _write(tmp_path, code)
    _write(tmp_path, "def test_right(): pass\n", "test_right.py")
    assert run("-n", "2", "--dist", "loadfile").returncode != 0


@pytest.mark.slow
def test_no_test_and_wrong_options_fail_the_run(run: Run, tmp_path: Path) -> None:
    assert run().returncode == 5
    _write(tmp_path, "def test_right(): pass\n")
    assert run("--no-such-option").returncode == 4
    assert run().returncode == 0


@pytest.mark.slow
def test_many_failures_are_not_run_again(run: Run, tmp_path: Path) -> None:
    _write(tmp_path, ONCE.format(count=21))
    done = run()
    assert done.returncode == 1 and "21 tests failed: more than 20 are not run again" in done.stdout


@pytest.mark.slow
def test_several_runs_are_counted_together(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _write(tmp_path / name, ONCE.format(count=3), f"test_{name}.py")
        assert run(name, ACCEL_PASSED_ALONE=str(log)).returncode == 0
    done = run("--passed-alone", str(log))
    assert done.returncode == 1 and "passed when run alone: 6" in done.stdout


LIMITED = """
import time
import pytest

@pytest.mark.timeout(1)
def test_within_two_seconds() -> None:
    time.sleep(1.2)
"""


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({"ACCEL_TEST_UNTIL": "1"}, "1 skipped"),
        pytest.param({}, "1 failed", marks=pytest.mark.slow),
        pytest.param({"ACCEL_TEST_PATIENCE": "60"}, "1 passed", marks=pytest.mark.slow),
    ],
)
def test_limits_of_time_are_multiplied_and_no_test_begins_after_the_end(run, tmp_path, variables, outcome) -> None:
    _write(tmp_path, LIMITED)
    done = run(**variables)
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("the time for tests was over: 0 ran, 1 did not" in done.stdout) is (outcome == "1 skipped")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["run(words, timeout=40)", "Popen(words).wait(40)", "Popen(words).wait(20)"])
def test_limits_of_programs_are_multiplied_too(run: Run, tmp_path: Path, call: str) -> None:
    _write(tmp_path, f"import subprocess\nwords = ['sleep', '2.5']\ndef test_program():\n    subprocess.{call}\n")
    done = run(ACCEL_TEST_PATIENCE="0.05")
    assert ("TimeoutExpired" in done.stdout) is ("40" in call), done.stdout


@pytest.mark.slow
def test_the_second_run_ignores_the_end_of_the_first(run: Run, tmp_path: Path) -> None:
    _write(tmp_path, "import os\ndef test_wrong():\n    assert 'ACCEL_TEST_UNTIL' not in os.environ\n")
    done = run(ACCEL_TEST_UNTIL=str(time.time() + 3600))
    assert done.returncode == 0 and "passed when run alone: 1" in done.stdout


TIERS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_fast(number): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_slow(number): pass

@pytest.mark.timing
def test_timing(): pass
"""


@pytest.mark.slow  # eight runs of pytest, as those below
def test_tiers_and_their_order(run: Run, tmp_path: Path) -> None:
    _write(tmp_path, TIERS)

    def order(*arguments: str, **variables: str) -> list[str]:
        done = run("-v", *arguments, **variables)
        assert done.returncode == 0, done.stdout
        return re.findall(r"::test_(\w+(?:\[\d+\])?) (?:PASSED|SKIPPED)", done.stdout)

    fast = order()
    assert len(fast) == 20 and fast == order() and fast != sorted(fast)
    everything = order("--all")
    assert len(everything) == 40 and all(name.startswith("slow") for name in everything[:20])
    assert order("--all", "-m", "timing") == ["timing"]
    assert order("test_it.py::test_timing") == ["timing"]
    drawn = order("--all", "-m", "slow", "--order-seed", "7")
    assert (
        drawn == order("--all", "-m", "slow", "--order-seed", "7") != order("--all", "-m", "slow", "--order-seed", "8")
    )
