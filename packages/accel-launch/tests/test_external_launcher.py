"""Programs that start ranks, simulated by shell scripts: their output, failure reports and exit codes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from accel_launch.elastic.worker import decode, encode
from accel_launch.external_launcher import run_external
from accel_launch.launchers.rank import main
from accel_state.errors import ConfigurationError
from accel_state.ports import reserved_port

# A program that runs two ranks one after the other, and exits with its own code.
RELAY = """
import json, os, subprocess, sys
from accel_launch.external_launcher import run_external
program = "import subprocess, sys; [subprocess.call(text.split()) for text in sys.argv[2:]]; sys.exit(int(sys.argv[1]))"
words = [sys.executable, "-c", program, *sys.argv[1:]]
sys.exit(run_external(words, dict(os.environ)))
"""


@pytest.fixture
def relay(shell):
    """Run ranks (each the arguments of the worker, or a command with python -m) under a program with this exit code."""
    import accel_launch

    worker = f"{next(iter(accel_launch.__path__))}/elastic/start_worker.py"
    shell.write("relay.py", RELAY)

    def run(code: int, *ranks: str):
        started = [words if " -m " in words else f"{sys.executable} {worker} {words}" for words in ranks]
        commands = [f"env RANK={index} WORLD_SIZE=2 {words}" for index, words in enumerate(started)]
        return subprocess.run(
            [sys.executable, "relay.py", str(code), *commands],
            cwd=shell.folder,
            env=shell.env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run


def test_the_first_report_is_printed_last(shell, relay) -> None:
    shell.write("s.py", "import sys\nprint('out')\nprint('err', file=sys.stderr)\nraise KeyError(sys.argv[1:])\n")
    result = relay(9, f"script encoded s.py {encode(['', 'a b', '$x'])}", f"script encoded s.py {encode([])}")
    assert result.returncode == 1, "the rank's own code, not the program's"
    assert (
        result.stdout == "out\nout\n"
        and result.stderr.count("err\n") == 2
        and "accel-launch-failure" not in result.stderr
    )
    end = result.stderr[result.stderr.index("accel launch: ") :]
    assert end.startswith("accel launch: rank 0 of 2 failed first") and end.endswith("KeyError: ['', 'a b', '$x']\n")


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(7)", 7, "rank 1 of 2 ended first with exit code 7 ("),
        ("raise KeyError('x')", 1, "rank 1 of 2 failed first ("),
        ("os.abort()", 134, "rank 1 of 2 was ended by SIGABRT ("),
    ],
)
def test_the_exit_of_the_script_is_reported_not_a_later_crash(shell, relay, end, code, says) -> None:
    """A thread of a process group can crash when a script ends with the group open."""
    shell.write("s.py", f"import atexit, os, sys\natexit.register(os.abort)\n{end}\n")
    mpi = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=127.0.0.1"
    result = relay(134, f"{mpi} {sys.executable} -m accel_launch.launchers.rank script s.py")
    assert result.stderr.rpartition("accel launch: ")[2].startswith(says), result.stderr
    assert result.returncode == code


OPEN_GROUP = """
import atexit, os, sys
import torch
import torch.distributed as dist

class AbortsInTeardown:
    def __del__(self):
        os.abort()

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
kept = AbortsInTeardown()
log = open("log.txt", "w")
log.write("not closed")
atexit.register(print, "atexit")
if len(sys.argv) > 1:
    sys.exit(sys.argv[1])
raise KeyError("labels.csv")
"""


@pytest.mark.parametrize("args", [[], pytest.param(["no labels"], marks=pytest.mark.slow)])  # one interpreter more
def test_a_failure_with_an_open_process_group_cannot_abort(shell, args) -> None:
    """In Python's teardown a thread that has done an all-reduce, and not yet released its tensor, aborts the process.

    That depends on the scheduler; an object that aborts in the teardown shows that there is none.
    """
    import accel_launch

    shell.write("s.py", OPEN_GROUP)
    worker = f"{next(iter(accel_launch.__path__))}/elastic/start_worker.py"
    with reserved_port() as port:
        group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        result = subprocess.run(
            [sys.executable, worker, "script", "encoded", "s.py", encode(args)],
            cwd=shell.folder,
            env={**shell.env, **group, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert result.returncode == 1, result.stderr
    # Not at the end: torch 2.6 may warn of the tensor.
    assert (f"{args[0]}\n" if args else "KeyError: 'labels.csv'\n") in result.stderr
    assert result.stdout == "atexit\n" and (shell.folder / "log.txt").read_text() == "not closed"


def test_a_long_traceback_keeps_its_end(shell, relay) -> None:
    shell.write("s.py", f"raise ValueError('{'x' * 9000}' + 'the end')\n")
    end = relay(1, f"script encoded s.py {encode([])}").stderr.rsplit("accel launch: ", 1)[1]
    assert "(its beginning is left out)" in end and end.endswith("xthe end\n") and len(end) < 4000


def test_a_handled_failure_is_not_reported(shell, relay) -> None:
    shell.write("s.py", "raise SystemExit(3)\n")
    assert relay(0, f"script encoded s.py {encode([])}").returncode == 0


def test_a_program_without_reports(relay) -> None:
    result = relay(7)
    assert (result.returncode, result.stderr) == (7, "")


def test_a_line_that_only_looks_like_a_report(shell, relay) -> None:
    shell.write("s.py", "import sys\nprint('\\x1eaccel-launch-failure {', file=sys.stderr)\nsys.exit(4)\n")
    result = relay(4, f"script encoded s.py {encode([])}")
    assert result.returncode == 4 and "\x1eaccel-launch-failure {\n" in result.stderr


def test_a_program_that_cannot_be_started(tmp_path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigurationError, match="cannot be started: No such file"):
        run_external([str(tmp_path / "none")], {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_no_mpi_started() -> None:
    with pytest.raises(ConfigurationError, match=r"no MPI launcher has started s\.py"):
        main(["script", "s.py"], {"RANK": "0", "WORLD_SIZE": "1"})


def test_arguments_survive() -> None:
    for args in ([], [""], ["a b", "'\"$`\\", "é\n"], ["x" * 1000]):
        assert decode(encode(args)) == args
        assert "=" not in encode(args)
