"""Unplanned ends of a script: nothing that was logged is lost, and the process always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forks import Processes

from accel_track import Run, find_runs

# Some start interpreters that import torch.
pytestmark = pytest.mark.timeout(300)

HEAD = """
import os, sys, threading, time
from accel_track import Delivery, GeneralTracker, TrackerRun
tracking = TrackerRun("jsonl", "runs")
tracking.init_trackers("project", {"a": 1})
for step in range(300):
    tracking.log({"loss": step}, step=step)
"""


def run_script(processes: Processes, code: str, folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    result = processes.run(textwrap.dedent(code), cwd=folder, env=os.environ, timeout=280)
    assert result.returncode == status, result.stderr
    return result


def the_run(folder: Path) -> Run:
    (run,) = find_runs(folder / "runs")
    return run


@pytest.mark.slow  # six processes; test_a_killed_process_leaves_what_was_delivered is fast
@pytest.mark.parametrize(
    ("ending", "status", "marked"),
    [
        ("", 0, "finished"),
        ("tracking.finish()", 0, "finished"),
        ("sys.exit(3)", 3, "finished"),
        ("raise ValueError('oh')", 1, "failed"),
        ("del tracking", 0, "finished"),
        ("with tracking: raise ValueError('oh')", 1, "failed"),
    ],
)
def test_nothing_is_lost_at_the_end(
    ending: str, status: int, marked: str, tmp_path: Path, processes: Processes
) -> None:
    run_script(processes, HEAD + ending, tmp_path, status)
    run = the_run(tmp_path)
    assert [row["loss"] for row in run.rows] == list(range(300))
    assert run.facts["status"] == marked and run.facts["config"] == {"a": 1}


@pytest.mark.slow  # waits for a tracker that hangs; strict failures at the end are fast
def test_a_tracker_that_hangs_does_not_keep_the_interpreter(tmp_path: Path, processes: Processes) -> None:
    code = """
    import threading, time
    from accel_track import Delivery, GeneralTracker, TrackerRun

    class Stuck(GeneralTracker):
        name, requires_logging_directory, tracker = "stuck", False, None
        def log(self, values, step=None, **kwargs):
            entered.set()
            threading.Event().wait()

    entered = threading.Event()
    tracking = TrackerRun(Stuck(), delivery=Delivery(stall_timeout=1.0))
    tracking.init_trackers("project")
    for step in range(5):
        tracking.log({"a": 1}, step=step)
    entered.wait()
    """
    result = run_script(processes, code, tmp_path)
    assert "hangs in log() and is disabled: TimeoutError: no progress for 1 s. Queued calls lost: 4" in result.stderr


@pytest.mark.slow  # stops a process for seconds; test_a_killed_process_... is fast
def test_a_process_that_is_stopped_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """By Ctrl-Z, or with its job: the tracker is not the one that hangs."""
    code = """
    import time
    from accel_track import Delivery, GeneralTracker, TrackerRun

    class Slow(GeneralTracker):
        name, requires_logging_directory, tracker = "slow", False, None
        def log(self, values, step=None, **kwargs):
            print("in log()", flush=True)
            for _ in range(10):
                time.sleep(0.1)
            print("logged", flush=True)

    tracking = TrackerRun(Slow(), delivery=Delivery(stall_timeout=3))
    tracking.init_trackers("project")
    tracking.log({"a": 1})
    tracking.finish()
    """
    tmp_path.joinpath("script.py").write_text(textwrap.dedent(code))
    script = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with script:
        try:
            assert script.stdout.readline() == "in log()\n"
            script.send_signal(signal.SIGSTOP)
            time.sleep(4)
            script.send_signal(signal.SIGCONT)
            printed, errors = script.communicate(timeout=280)
        finally:
            script.kill()
    assert (printed, errors, script.returncode) == ("logged\n", "", 0)


def test_strict_failures_at_the_end_are_told(tmp_path: Path, processes: Processes) -> None:
    code = """
    from accel_track import GeneralTracker, TrackerRun

    class Broken(GeneralTracker):
        name, requires_logging_directory, tracker = "broken", False, None
        def log(self, values, step=None, **kwargs):
            raise OSError("full")

    tracking = TrackerRun(Broken(), strict=True)
    tracking.init_trackers("project")
    tracking.log({"a": 1})
    """
    assert (
        "The tracker 'broken' failed in log() and is disabled: OSError: full"
        in run_script(processes, code, tmp_path).stderr
    )


FORK = """
import multiprocessing
def child():
    tracking.log({"loss": -1}, step=1)
    tracking.log({"loss": -1}, step=1)
    tracking.get_tracker("jsonl").log({"loss": -2})
    tracking.log_images({})
    assert tracking.trackers != []
    tracking.flush()
    tracking.finish()
processes = [multiprocessing.get_context("fork").Process(target=child) for _ in range(3)]
for process in processes:
    process.start()
for step in range(300, 400):
    tracking.log({"loss": step}, step=step)
for process in processes:
    process.join()
    assert process.exitcode == 0, process.exitcode
pid = os.fork()
if pid == 0:
    sys.exit(5)  # runs what is registered for the end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
"""


@pytest.mark.slow  # a process that forks four; test_a_killed_process_... is fast
def test_forked_processes_neither_log_nor_hang(tmp_path: Path, processes: Processes) -> None:
    result = run_script(processes, HEAD + FORK, tmp_path)
    assert [row["loss"] for row in the_run(tmp_path).rows] == list(range(400))
    assert result.stderr.count("was called in a process forked from the one that started the run") == 3


@pytest.mark.slow  # spawns a second interpreter; test_a_killed_process_... is fast
def test_a_process_of_multiprocessing_keeps_its_run(tmp_path: Path) -> None:
    body = textwrap.indent(HEAD.replace("import os", "import multiprocessing, os"), "    ")
    code = f"""
import multiprocessing
def child():
{body}
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
"""
    tmp_path.joinpath("script.py").write_text(code)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, timeout=280, check=True)
    runs = find_runs(tmp_path / "runs")
    assert [len(run.rows) for run in runs] == [300, 300] and {run.facts["status"] for run in runs} == {"finished"}


def test_a_killed_process_leaves_what_was_delivered(tmp_path: Path, processes: Processes) -> None:
    result = run_script(processes, HEAD + "tracking.flush()\nos.kill(os.getpid(), 9)", tmp_path, -9)
    assert result.stderr == ""
    run = the_run(tmp_path)
    assert len(run.rows) == 300 and run.facts["status"] == "running"
