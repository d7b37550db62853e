"""DeepSpeed's own launchers, with the real DeepSpeed: over pdsh and ssh on loopback, and without ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from components import ssh, torchless
from components.digits import GLOO, environment, is_alive

from accel_state.ports import reserved_port

_MISSING = ("" if find_spec("deepspeed") else "deepspeed is not installed: scripts/test tells why") or ssh.missing(
    "pdsh"
)
pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "DeepSpeed, ssh and pdsh are installed"),
]

SHOW = """
import os, sys, time
from torchless import Group
group = Group()
rank, size = group.rank, group.sum(1)
if "fail" in sys.argv and rank == 1:
    raise ValueError("no such file: labels.csv")
if "sleep" in sys.argv:
    with open(f"pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300)
names = ("LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "MINE")
with open(f"rank{rank}", "w") as file:
    file.write(" ".join([str(size), *(os.environ.get(name, "-") for name in names), *sys.argv]))
group.sum(0)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh.SshServer]:
    with ssh.SshServer(tmp_path_factory.mktemp("ssh")) as running:
        yield running


class Launcher:
    """``accel launch``, for two hosts that are both this machine."""

    def __init__(self, server: ssh.SshServer, folder: Path) -> None:
        python = Path(sys.executable)
        self.folder = folder
        self.env = environment(
            PATH=os.pathsep.join([str(server.bin), str(python.parent), os.environ["PATH"]]),
            GLOO_SOCKET_IFNAME="lo",
            DS_ACCELERATOR="cpu",
            HOME=str(folder),
        )
        (folder / "s.py").write_text(SHOW)
        torchless.copy_to(folder)
        (folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
        self.command = [
            str(python),
            "-m",
            "accel_launch",
            "launch",
            "--cpu",
            "--use_deepspeed",
            "--main_process_ip=127.0.0.1",
            "--deepspeed_hostfile=hosts",
        ]

    def start(self, *words: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        # Ranks of several hosts write through one pipe: a character may be cut.
        return subprocess.Popen(
            [*self.command, *map(str, words)],
            cwd=self.folder,
            env=self.env,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
        )

    def run(self, *words: object) -> tuple[int, str, str]:
        process = self.start(*words)
        output, errors = process.communicate(timeout=300)
        return process.returncode, output, errors

    def ranks(self) -> list[str]:
        return [(self.folder / f"rank{rank}").read_text() for rank in (0, 1)]


@pytest.fixture
def launcher(server, tmp_path) -> Launcher:
    return Launcher(server, tmp_path)


@pytest.mark.slow  # DeepSpeed is imported for each host; test_dry_run compares the command lines
@pytest.mark.timeout(700)
def test_over_pdsh(launcher) -> None:
    # Data parallelism by torch: DeepSpeed only starts the ranks.
    (launcher.folder / "s.py").write_text(SHOW + "del os.environ['ACCELERATE_USE_DEEPSPEED']\n" + GLOO)
    # Variables that the user exports with DeepSpeed's file stay exported.
    (launcher.folder / ".deepspeed_env").write_text("MINE=kept\n")
    code, output, errors = launcher.run("--zero_stage=2", "s.py", "a b", "", "$HOME 'c'")
    assert code == 0, output + errors
    assert launcher.ranks() == ["2 0 true 2 kept s.py a b  $HOME 'c'"] * 2
    assert {"localhost: 0 2 0 3.0", "127.0.0.1: 1 2 0 3.0"} <= set(output.splitlines()), output


@pytest.mark.slow  # DeepSpeed is imported for each host; test_the_first_report_is_printed_last is fast
@pytest.mark.timeout(700)
def test_the_rank_that_failed_first_is_named_last(launcher) -> None:
    code, _, errors = launcher.run("s.py", "fail")
    end = errors[errors.rindex("accel launch: ") :]
    assert end.startswith("accel launch: rank 1 of 2 failed first (local rank 0 on ") and end.endswith(
        "ValueError: no such file: labels.csv\n"
    )
    assert code == 1


@pytest.mark.slow  # DeepSpeed is imported for each host; test_dry_run compares the command lines
@pytest.mark.timeout(700)
def test_without_ssh(launcher) -> None:
    with reserved_port() as port:
        words = ("--deepspeed_multinode_launcher=nossh", "--num_machines=2", f"--main_process_port={port}", "--quiet")
        processes = [launcher.start(*words, f"--machine_rank={rank}", "s.py") for rank in (1, 0)]
        try:
            outputs = [process.communicate(timeout=150) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert launcher.ranks() == ["2 0 true - - s.py"] * 2


@pytest.mark.slow  # DeepSpeed is imported for each host; signals have fast tests on one host
@pytest.mark.timeout(960)
def test_a_signal_ends_the_ranks_of_all_machines(launcher) -> None:
    process = launcher.start("s.py", "sleep")
    try:
        files = [launcher.folder / "pid0", launcher.folder / "pid1"]
        deadline = time.monotonic() + 150
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
        assert process.returncode == 130
        deadline = time.monotonic() + 60
        for file in files:
            pid = int(file.read_text())
            while is_alive(pid):
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
