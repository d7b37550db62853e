"""Signals reach the ranks, no process is left behind, and the launcher exits whatever it waits for."""

from __future__ import annotations

import os
import signal
import socket
import time

import psutil
import pytest

IGNORE = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: pathlib.Path('told' + os.environ['RANK']).touch())
"""


def test_a_signal_ends_everything(sleepers, ended) -> None:
    launcher, pids = sleepers(fresh=True)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    ended(pids)
    assert said.count("KeyboardInterrupt") == 1 and "worker.py" not in said, "one traceback, of the script only"
    assert said.endswith("accel launch: ended by SIGINT\n")


@pytest.mark.slow  # one more interpreter that imports torch; test_a_signal_ends_everything is fast
def test_an_ignored_signal_stays_ignored(shell, started) -> None:
    """nohup relies on this: otherwise closing the terminal would end the job."""
    shell.write(
        "s.py",
        "import pathlib, time; pathlib.Path('ready').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)",
    )
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
    time.sleep(0.5)
    (shell.folder / "go").touch()
    assert launcher.wait(60) == 0


@pytest.mark.parametrize("when", ["mkdtemp", "rmtree"])
def test_a_signal_without_running_ranks(shell, when) -> None:
    shell.write("s.py", "")
    result = shell.forked_python(f"""
        import os, shutil, signal, sys, tempfile
        import accel_launch.elastic.run
        from accel_launch.cli import main
        module = tempfile if {when!r} == "mkdtemp" else shutil
        former = getattr(module, {when!r})
        def interrupted(*args, **options):
            if "accel_launch_" in str(args) + str(options) and "attempt" not in str(args):  # torch calls it too
                setattr(module, {when!r}, former)
                os.kill(os.getpid(), signal.SIGTERM)
            return former(*args, **options)
        setattr(module, {when!r}, interrupted)
        sys.exit(main(["launch", "--cpu", "--num_processes", "2", "s.py"]))
    """)
    assert (result.returncode, result.stdout) == (143, "") and result.stderr == "accel launch: ended by SIGTERM\n"


def test_a_signal_between_the_starts_of_two_ranks(shell) -> None:
    """No further rank is started, and those that were are ended."""
    shell.write("s.py", "import time; time.sleep(300)")
    result = shell.forked_python("""
        import os, signal, subprocess, sys
        import accel_launch.elastic.run
        from accel_launch.cli import main
        started, former = [], subprocess.Popen.__init__
        def start(self, *args, **options):
            former(self, *args, **options)
            started.append(self)
            if len(started) in (2, 3):
                os.kill(os.getpid(), signal.SIGUSR1 if len(started) == 2 else signal.SIGTERM)
        subprocess.Popen.__init__ = start
        code = main(["launch", "--cpu", "--num_processes", "9", "s.py"])
        print(code, [process.poll() for process in started])
    """)
    assert (result.stdout, result.stderr) == ("143 [-15, -15, -15]\n", "accel launch: ended by SIGTERM\n")


def test_processes_that_cannot_be_started(shell) -> None:
    shell.write("s.py", "import time; time.sleep(300)")
    result = shell.forked_python("""
        import resource, psutil
        from accel_launch.cli import main
        import accel_launch.elastic.run
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        print(main(["launch", "--cpu", "--num_processes", "50", "--tee", "3", "s.py"]), psutil.Process().children())
    """)
    assert result.stdout == "2 []\n"
    assert "the 50 processes of this machine cannot be started: Too many open files" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_second_signal_ends_ranks_that_ignore_the_first(shell, sleepers, ended, wait_until) -> None:
    launcher, pids = sleepers(IGNORE)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: all((shell.folder / f"told{rank}").exists() for rank in (0, 1)), "both ranks are told to end")
    assert launcher.poll() is None and all(psutil.pid_exists(pid) for pid in pids)
    begin = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130 and time.monotonic() - begin < 20, "one signal alone takes half a minute"
    ended(pids)


def test_ranks_end_when_the_launcher_is_killed(sleepers, ended) -> None:
    launcher, pids = sleepers()
    launcher.kill()
    launcher.wait(60)
    ended(pids)


def test_children_of_a_failed_rank_are_ended(shell, started, ended) -> None:
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
    launcher = started(shell.fork("launch", "--cpu", "--num_processes", "2", "s.py"))
    assert launcher.wait(60) == 3
    ended([int((shell.folder / "child").read_text())])


def _catches_sigterm(pid: int) -> bool:
    """Whether a process has installed a handler: on a busy machine this can be long after torch is loaded."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow  # waits in the rendezvous; test_a_signal_without_running_ranks is fast
def test_waiting_for_another_machine_can_be_interrupted(shell, started, wait_until) -> None:
    """The machine of rank 0 never arrives: the main thread is blocked in a call into the store."""
    shell.write("s.py", "")
    free = socket.socket()
    free.bind(("127.0.0.1", 0))  # without a listener
    words = [
        "--num_processes=2",
        "--num_machines=2",
        "--machine_rank=1",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={free.getsockname()[1]}",
        "s.py",
    ]
    launcher = started(shell.fork("launch", "--cpu", *words))
    wait_until(lambda: _catches_sigterm(launcher.pid), "the launcher is ready for signals")
    time.sleep(1)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 143, "it would wait for minutes"
    free.close()


def test_a_signal_for_the_ranks_is_forwarded(shell, started, wait_until) -> None:
    """The ranks decide what it means: these continue."""
    shell.write(
        "s.py",
        """
        import os, pathlib, signal, time
        rank = os.environ["RANK"]
        signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("heard" + rank).touch())
        pathlib.Path("ready" + rank).touch()
        while not pathlib.Path("heard" + rank).exists():
            time.sleep(0.05)
    """,
    )
    launcher = started(shell.fork("launch", "--cpu", "--num_processes", "2", "s.py"))
    wait_until(lambda: all((shell.folder / f"ready{rank}").exists() for rank in (0, 1)), "both ranks are ready")
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(60) == 0


def test_a_signal_that_ranks_do_not_handle_ends_them(sleepers, ended) -> None:
    launcher, pids = sleepers()
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(60) == 128 + signal.SIGUSR1
    ended(pids)


SAVES = """
    import os, pathlib, signal, sys, time
    from accel_state.preemption import Note, launcher_directory, write_note
    rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count == "1":
        sys.exit(0)
    def save(number, frame):
        pathlib.Path("told" + rank).touch()
        while not all(pathlib.Path(f"told{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.05)  # who has saved makes the launcher end the others
        time.sleep(2)  # longer than a launcher that knows nothing of it has patience for
        write_note(launcher_directory(), Note(os.getpid(), [signal.SIGTERM, signal.SIGUSR1], 60.0, 75, "here"))
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
    write_note(launcher_directory(), Note(os.getpid(), [signal.SIGTERM, signal.SIGUSR1], 60.0))
    pathlib.Path("ready" + rank).write_text(str(os.getpid()))
    time.sleep(300)
"""


def ready(shell, ranks: int) -> list[int]:
    """The ranks' processes, once they save on signals; none before."""
    files = [shell.folder / f"ready{rank}" for rank in range(ranks)]
    texts = [file.read_text() for file in files if file.exists()]
    return [int(text) for text in texts] if len(texts) == ranks and all(texts) else []


@pytest.mark.slow  # three starts with ranks that save; test_a_signal_for_the_ranks_is_forwarded is fast
@pytest.mark.parametrize(
    ("number", "ranks", "restarts"), [(signal.SIGTERM, 2, 0), (signal.SIGUSR1, 2, 1), (signal.SIGTERM, 1, 1)]
)
def test_ranks_that_save_are_waited_for(shell, started, wait_until, number: int, ranks: int, restarts: int) -> None:
    """They are not restarted: a signal to the launcher ends the run on this machine."""
    shell.write("s.py", SAVES)
    launcher = started(
        shell.fork("launch", "--cpu", "--num_processes", str(ranks), "--max_restarts", str(restarts), "s.py")
    )
    wait_until(lambda: ready(shell, ranks), "the ranks are ready")
    launcher.send_signal(number)
    assert launcher.wait(60) == 75


@pytest.mark.slow  # two machines and a long interval; test_notes_for_the_launcher is fast
def test_ranks_that_save_exit_before_the_other_machines_are_notified(shell, started, wait_until, free_port) -> None:
    """No rank is left while this launcher waits until the other machines have read the result."""
    shell.write("s.py", SAVES.replace('range(int(os.environ["WORLD_SIZE"]))', "[1]"))
    words = [
        "--num_processes=2",
        "--num_machines=2",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={free_port()}",
    ]
    first, second = (
        started(shell.fork("launch", "--cpu", "--monitor_interval=4", *words, f"--machine_rank={rank}", "s.py"))
        for rank in (0, 1)
    )
    wait_until(lambda: ready(shell, 2), "the ranks are ready")
    second.terminate()
    assert second.wait(100) == 75
    first.terminate()
    assert first.wait(100) == 75
    assert not os.listdir(shell.env["TMPDIR"])


@pytest.mark.slow  # ranks take seconds to save; test_restarts is fast
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_saved_are_started_again(shell, started, wait_until, ranks: int) -> None:
    """Only the ranks were signalled, so they are restarted."""
    shell.write("s.py", SAVES)
    launcher = started(shell.fork("launch", "--cpu", "--num_processes", str(ranks), "--max_restarts", "1", "s.py"))
    wait_until(lambda: ready(shell, ranks), "the ranks are ready")
    for pid in ready(shell, ranks):
        os.kill(pid, signal.SIGUSR1)
    assert launcher.wait(60) == 0
