"""Launches of a range of machines, as several launchers on this one: exit codes, and what they say."""

from __future__ import annotations

import signal

import pytest

# Each start of a rank is a file; the rank that the command line names dies in its first start, or in each.
SCRIPT = """
    import os, pathlib, signal, sys, time
    rank, size, count = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    here = pathlib.Path(f"up{count}.{rank}.{size}")
    here.write_text(str(os.getpid()))
    while len(list(pathlib.Path().glob(f"up{count}.*.{size}"))) < int(size):
        time.sleep(0.02)
    if sys.argv[1] == rank and (sys.argv[2] == "always" or count == "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    while not pathlib.Path("stop").exists():
        time.sleep(0.02)
"""


@pytest.fixture
def launch(shell, started, free_port):
    """Start launchers of a range of machines, which meet at one port."""
    port, _ = free_port(), shell.write("s.py", SCRIPT)

    def start(machines: str, *words: object, restarts: int = 0, conf: str = "last_call_timeout=1"):
        common = ["launch", "--cpu", f"--num_machines={machines}", "--main_process_ip=127.0.0.1"]
        common += [f"--main_process_port={port}", f"--max_restarts={restarts}", f"--rdzv_conf={conf}"]
        return started(shell.fork(*common, "s.py", *words))

    return start


def ended(*launchers) -> tuple[list[int], list[str]]:
    """Exit codes and stderr."""
    errors = [one.communicate(timeout=110)[1] for one in launchers]
    return [one.returncode for one in launchers], errors


@pytest.fixture
def wait_for(shell, wait_until):
    """Wait until a rank of a start runs."""
    return lambda name: wait_until(lambda: (shell.folder / name).exists(), f"{name} exists")


@pytest.mark.slow  # five launchers; test_ranged_rendezvous.py counts restarts in this process
def test_a_failure_is_a_restart_and_the_last_one_ends_all(launch, shell, wait_for) -> None:
    first = launch("2:2", "x", "never")  # a range of one number is that number: it needs ranks
    assert first.wait(60) == 2
    machines = [launch("1:2", 1, "once", restarts=1) for _ in range(2)]
    wait_for("up1.1.2")
    (shell.folder / "stop").touch()
    codes, errors = ended(*machines)
    assert codes == [0, 0], errors
    for error in errors:
        assert "rank 1 of 2 was ended by SIGKILL" in error, error
        assert "a process failed (restart 1 of 1): starting 2 processes on 2 machines" in error, error
    for file in shell.folder.glob("up*"):
        file.unlink()
    (shell.folder / "stop").unlink()
    codes, errors = ended(*[launch("1:2", 1, "always") for _ in range(2)])
    assert codes == [137, 137], errors
    assert all("rank 1 of 2 was ended by SIGKILL" in error for error in errors), errors


def test_ctrl_c_at_the_main_machine_ends_all(launch, wait_for) -> None:
    main = launch("1:3", "x", "never")
    wait_for("up0.0.1")
    other = launch("1:3", "x", "never")
    wait_for("up0.1.2")
    main.send_signal(signal.SIGINT)
    codes, errors = ended(main, other)
    assert codes == [130, 130], errors
    assert "ended by SIGINT" in errors[1]


@pytest.mark.slow  # waits for a time limit; test_ranged_rendezvous.py has it in this process
def test_a_run_without_enough_machines_waits_and_ends(launch, wait_for) -> None:
    main, other = (launch("2:3", "x", "never", conf="last_call_timeout=1,timeout=6") for _ in range(2))
    wait_for("up0.1.2")
    other.send_signal(signal.SIGTERM)
    codes, errors = ended(other, main)
    assert sorted(codes) == [2, 143], errors
    error = errors[codes.index(2)]
    assert "error: the run cannot continue, and the processes of this machine were ended: not within 6 s" in error, (
        error
    )
    assert "Run the same command again to continue from the newest state." in error


def test_a_machine_that_stood_by_ends_with_the_run(launch, shell, wait_for) -> None:
    machines = [launch("1:2", "x", "never") for _ in range(2)]
    wait_for("up0.1.2")
    spare = launch("1:2", "x", "never")
    assert spare.stderr is not None
    assert "starting up to 2 processes (one per machine, --cpu is set)" in spare.stderr.readline()
    line = spare.stderr.readline()
    assert "this machine stands by: 2 machines train, the most of --num_machines 1:2" in line, line
    (shell.folder / "stop").touch()
    codes, errors = ended(*machines, spare)
    assert codes == [0, 0, 0] and "the run has ended, without this machine" in errors[2], errors
