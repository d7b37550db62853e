"""Signals reach the ranks, no process is left behind, and the launcher ends whatever it was waiting for."""

from __future__ import annotations

import os
import signal
import time

import psutil

IGNORE = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)"


def test_a_signal_ends_everything(sleepers, ended) -> None:
    launcher, pids = sleepers()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 130
    ended(pids)


def test_an_ignored_signal_stays_ignored(shell, started) -> None:
    """What nohup does: without this, closing the terminal would end the job."""
    shell.write("s.py", "import pathlib, time; pathlib.Path('ready').touch(); time.sleep(4)")
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher = started(shell.start("launch", "--cpu", "--num_processes", "2", "s.py"))
    finally:
        signal.signal(signal.SIGHUP, former)
    while not (shell.folder / "ready").exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(20) == 0


def test_ranks_can_clean_up(shell, sleepers, ended) -> None:
    cleanup = "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved' + os.environ['RANK']).write_text(''), sys.exit(0)))"
    launcher, pids = sleepers(cleanup)
    launcher.terminate()
    assert launcher.wait(20) == 143
    ended(pids)
    assert (shell.folder / "saved0").exists() and (shell.folder / "saved1").exists()


def test_a_second_signal_ends_ranks_that_ignore_the_first(sleepers, ended) -> None:
    launcher, pids = sleepers(IGNORE)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    assert launcher.poll() is None and all(psutil.pid_exists(pid) for pid in pids)
    begin = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(10) == 130 and time.monotonic() - begin < 5
    ended(pids)


def test_ranks_end_when_the_launcher_is_killed(sleepers, ended) -> None:
    launcher, pids = sleepers()
    launcher.kill()
    launcher.wait(10)
    ended(pids)


def test_what_a_failed_rank_started_ends_too(shell, started, ended) -> None:
    shell.write(
        "s.py",
        """
        import os, pathlib, subprocess, sys
        if os.environ["RANK"] == "1":
            child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            pathlib.Path("child").write_text(str(child.pid))
            sys.exit(3)
    """,
    )
    launcher = started(shell.start("launch", "--cpu", "--num_processes", "2", "s.py"))
    assert launcher.wait(30) == 3
    ended([int((shell.folder / "child").read_text())])


def _catches_sigterm(pid: int) -> bool:
    """Whether a process has installed a handler: on a busy machine that comes long after torch is loaded."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_waiting_for_another_machine_can_be_interrupted(shell, started, wait_until) -> None:
    """The machine of rank 0 never comes: the main thread sits in one long call into the store."""
    shell.write("s.py", "")
    words = [
        "--num_processes=2",
        "--num_machines=2",
        "--machine_rank=1",
        "--main_process_ip=127.0.0.1",
        "--main_process_port=29999",
        "s.py",
    ]
    launcher = started(shell.start("launch", "--cpu", *words))
    wait_until(lambda: _catches_sigterm(launcher.pid), "the launcher is ready for signals")
    time.sleep(1)
    begin = time.monotonic()
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(15) == 143 and time.monotonic() - begin < 6
