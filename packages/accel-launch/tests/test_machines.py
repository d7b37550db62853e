"""Several machines, simulated by several launchers on this one: static and c10d rendezvous, and exit codes."""

from __future__ import annotations

import re
import signal
import socket

import pytest


def start_machines(shell, started, port: int, script: str, *words: str, ranks: bool = True):
    common = [
        "launch",
        "--cpu",
        "--num_processes=2",
        "--num_machines=2",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={port}",
        *words,
    ]
    return [started(shell.fork(*common, *([f"--machine_rank={rank}"] if ranks else []), script)) for rank in (1, 0)][
        ::-1
    ]


RANKS = """
import os, socket
def listens(host):
    with socket.socket() as probe:
        return probe.connect_ex((host, int(os.environ["MASTER_PORT"]))) == 0
# A server on all interfaces would answer at 127.0.0.2 too.
where = [host for host in ("127.0.0.1", "127.0.0.2") if listens(host)]
print(os.environ["GROUP_RANK"], os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], *where)
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])  # test_launch_hosts.py has ranks that form a process group
def test_two_machines_form_one_world(shell, started, free_port, backend) -> None:
    shell.write("s.py", RANKS)
    words = ("--rdzv_backend", backend, "--rdzv_conf", "timeout=100")
    machines = start_machines(shell, started, free_port(), "s.py", *words, ranks=backend == "static")
    outputs = [machine.communicate(timeout=100) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    lines = sorted(line for out, _ in outputs for line in out.splitlines())
    assert lines == ["0 0 0 2 127.0.0.1", "1 1 0 2 127.0.0.1"]
    if backend == "static":
        assert outputs[0][0].startswith("0 0") and outputs[1][0].startswith("1 1")


@pytest.mark.slow  # sleeps three seconds; test_two_machines_form_one_world is fast
def test_a_machine_that_succeeded_waits_for_the_others(shell, started, free_port) -> None:
    shell.write("s.py", "import os, time; time.sleep(3 * int(os.environ['RANK']))")
    first, second = start_machines(shell, started, free_port(), "s.py")
    second.communicate(timeout=110)
    assert second.returncode == 0
    assert first.wait(60) == 0


@pytest.mark.slow  # waits for timeouts; test_a_missing_machine_is_named is fast, with the other rendezvous
def test_missing_machines_are_reported(shell, free_port) -> None:
    shell.write("s.py", "")
    words = [
        "--num_processes=2",
        "--num_machines=2",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={free_port()}",
        "--machine_rank=1",
        "--rdzv_conf=timeout=3,join_timeout=3,read_timeout=3",
        "--rdzv_backend=c10d",
    ]
    result = shell.launch("--quiet", *words, "s.py")
    assert result.returncode == 2, result.stderr
    assert "error: the 2 machines did not meet at 127.0.0.1:" in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )


@pytest.mark.slow  # waits for a time limit; test_board.py cuts the connection of two machines
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_suspended_launcher_is_given_up_and_learns_of_it(shell, started, free_port, wait_until, backend) -> None:
    shell.write("s.py", "import os, time; open(f'up{os.environ[\"RANK\"]}', 'w').close(); time.sleep(300)")
    port = free_port()
    words = ["launch", "--cpu", "--num_processes=2", "--num_machines=2", "--main_process_ip=127.0.0.1"]
    words += [f"--main_process_port={port}", "--machine_timeout=4", f"--rdzv_backend={backend}"]

    def start(rank: int):
        return started(shell.fork(*words, *([f"--machine_rank={rank}"] if backend == "static" else []), "s.py"))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    first = start(0)
    wait_until(listens, "the first launcher listens")
    second = start(1)
    wait_until(lambda: all((shell.folder / f"up{rank}").exists() for rank in (0, 1)), "all ranks run")
    first.send_signal(signal.SIGSTOP)
    try:
        error = second.communicate(timeout=100)[1]
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.returncode == 1, error
    named = r"accel launch: machine rank \d \(.*\) is lost: it has sent no heartbeat for \d+ s\."
    assert re.search(named, error), error
    told = first.communicate(timeout=100)[1]
    assert first.returncode == 1 and re.search(named, told), told
