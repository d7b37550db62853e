"""Every option of torchrun is taken with its meaning, or answered with what serves in its place."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from accel_launch.parser import build_parser
from accel_launch.torchrun_options import UNUSED, _split

SHOW = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"


def torchruns() -> list[argparse.Action]:
    """The options of the installed torchrun."""
    return [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


def ours() -> set[str]:
    return set(build_parser()._option_string_actions)


@pytest.mark.parametrize("action", torchruns(), ids=lambda action: action.dest)
def test_every_option_of_torchrun_is_taken_or_answered(action: argparse.Action, shell) -> None:
    shell.write("s.py", "")
    taken = ours()
    for flag in action.option_strings:
        assert (flag in taken) != (flag in UNUSED), f"{flag}: take it, or answer it in torchrun_options.py"
        if flag in UNUSED:
            result = shell.call("launch", *([flag] if action.nargs == 0 else [f"{flag}=1"]), "s.py")
            assert result.returncode == 2 and UNUSED[flag].split(":")[0] in result.stderr, result.stderr


def test_nothing_is_answered_that_torchrun_no_longer_has() -> None:
    known = {flag for action in torchruns() for flag in action.option_strings}
    # Older versions of torch lack some.
    assert {flag for flag in UNUSED if flag not in known} <= {"--numa-binding", "--numa_binding"} | {
        *("--event-log-handler", "--event_log_handler", "--signals-to-handle", "--signals_to_handle"),
        *("--print-completion", "--print_completion", "--virtual-local-rank", "--virtual_local_rank"),
        *(f"--duplicate{sign}std{stream}{sign}filters" for sign in "-_" for stream in ("out", "err")),
    }


def plan(shell, *words: str, **env: str) -> list[dict]:
    result = shell.call("launch", "--dry_run", "--json", *words, "s.py", **env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def ranks(machines: list[dict]) -> list[dict[str, str]]:
    return [rank for machine in machines for rank in machine["ranks"]]


@pytest.fixture
def script(shell) -> Path:
    return shell.write("s.py", SHOW)


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr host1 --master-port 4321",
        "--nnodes=2 --nproc_per_node=2 --node_rank=1 --rdzv-endpoint=host1:4321 --rdzv-id=job",
        "--nnodes 1:2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host1:4321 --max-restarts 3",
    ],
)
def test_machines_in_torchruns_words_are_those_in_ours(shell, script, words: str) -> None:
    own = "--num_machines 2 --num_processes 4 --machine_rank 1 --main_process_ip host1 --main_process_port 4321"
    if "c10d" in words:
        own = own.replace("2", "1:2", 1).replace("--machine_rank 1", "--rdzv_backend c10d --max_restarts 3")
    theirs, expected = (plan(shell, *text.split()) for text in (words, own))
    assert ranks(theirs) == ranks(expected) and len(ranks(theirs)) == 4


def test_variables_of_torchrun_are_read(shell, script) -> None:
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_RDZV_ENDPOINT": "host1:4321"}
    found = ranks(plan(shell, "--machine_rank", "0", **variables))
    assert len(found) == 6 and {rank["MASTER_ADDR"] for rank in found} == {"host1"}


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("h:1", ("h", 1)), ("h", ("h", None)), ("[fd00::1]:29500", ("fd00::1", 29500)), ("[fd00::1]", ("fd00::1", None))],
)
def test_endpoints(endpoint: str, parts: tuple[str, int | None]) -> None:
    assert _split(endpoint) == parts


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--nproc-per-node 2 --num_processes 4", ["--nproc_per_node 2", "num_processes 2", "--num_processes 4"]),
        ("--nproc-per-node many", ["'many'", "auto"]),
        ("--nproc-per-node 0", ["'0'"]),
        ("--nproc-per-node gpu --cpu", ["--nproc_per_node gpu", "--cpu"]),
        ("--standalone --nnodes 2", ["--standalone", "--num_machines 2"]),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint a:1 --master-addr b", ["a:1", "--main_process_ip b"]),
        ("--rdzv-endpoint a:70000", ["a:70000", "HOST:PORT"]),
        ("--rdzv-endpoint a:b", ["a:b"]),
        ("--rdzv-id a/b", ["a/b"]),
        ("--rdzv-backend etcd", ["etcd", "static, c10d"]),
        ("--redirects 5", ["'5'"]),
        ("--local-ranks-filter 0,x", ["0,x"]),
        ("--nproc-per-node 2 --local-ranks-filter 2", ["local_ranks_filter 2", "0 to 1"]),
        ("--nproc-per-node 2 --redirects 3:1", ["redirects 3:1", "0 to 1"]),
        ("--shutdown-timeout 0", ["'0'", "at least 1"]),
        ("--local-addr 10.0.0.1", ["--local-addr is not an option", "GLOO_SOCKET_IFNAME"]),
    ],
)
def test_what_cannot_be_meant_is_refused(shell, script, words: str, parts: list[str]) -> None:
    result = shell.call("launch", *words.split(), "s.py")
    assert result.returncode == 2 and all(part in result.stderr for part in parts), result.stderr


def test_a_command_line_of_torchrun_runs(shell, script) -> None:
    # -m, --role, --monitor-interval, --rdzv-conf and --log-dir have tests of their own.
    words = "--standalone --nnodes=1 --nproc-per-node=2 --max-restarts=0 --rdzv-backend=c10d --rdzv-id=job"
    result = shell.launch(*words.split(), "--log-dir", "logs", "s.py")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 2 0 127.0.0.1", "1 2 1 127.0.0.1"]
    assert [path.name[:4] for path in (shell.folder / "logs").iterdir()] == ["job_"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a single process has no rank")
@pytest.mark.parametrize("word", ["cpu", "auto"])
def test_every_cpu_gets_a_process(shell, script, word: str) -> None:
    assert len(ranks(plan(shell, "--cpu", "--nproc-per-node", word))) == os.cpu_count()


PRINT = "import os, sys; rank = os.environ['RANK']; print('out', rank); print('err', rank, file=sys.stderr)"


def logs(shell) -> dict[str, str]:
    found = (shell.folder / "logs").glob("*/attempt_0/*/*.log")
    return {f"{path.parent.name}/{path.stem}": path.read_text() for path in found}


def test_redirected_streams_are_in_files_only_and_others_have_the_prefix(shell) -> None:
    shell.write("s.py", PRINT)
    words = ["--nproc-per-node", "2", "-r", "0:1,1:3", "--tee", "1:2", "--log-dir", "logs"]
    words += ["--role", "trainer", "--log-line-prefix-template", "${role_name}/${rank}>"]
    result = shell.launch(*words, "s.py")
    assert (result.returncode, result.stdout) == (0, "")
    assert sorted(result.stderr.splitlines()[-2:]) == ["err 0", "trainer/1>err 1"]
    assert logs(shell) == {"0/stdout": "out 0\n", "1/stdout": "out 1\n", "1/stderr": "err 1\n"}


def test_only_some_ranks_are_shown_and_the_files_are_complete(shell) -> None:
    shell.write("s.py", PRINT)
    words = ["--nproc-per-node", "3", "--local-ranks-filter", "1", "--tee", "2:1", "--log-dir", "logs"]
    result = shell.launch(*words, "s.py")
    assert (result.returncode, result.stdout) == (0, "out 1\n")
    assert [line for line in result.stderr.splitlines() if line.startswith("err")] == ["err 1"]
    assert logs(shell) == {"2/stdout": "out 2\n"}


def test_the_traceback_of_a_hidden_rank_is_shown(shell) -> None:
    shell.write("s.py", "import os\nif os.environ['RANK'] == '1': raise ValueError('hidden')\n")
    result = shell.launch("--nproc-per-node", "2", "--local-ranks-filter", "0", "s.py")
    assert result.returncode == 1 and "ValueError: hidden" in result.stderr.split("accel launch: rank 1")[1]


def test_processes_that_ignore_sigterm_are_killed_after_the_timeout(shell) -> None:
    shell.write(
        "s.py",
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ready"):
                time.sleep(0.01)
            sys.exit(3)
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        open("ready", "w").close()
        while True:
            time.sleep(0.25)
            if told:
                print("still here", flush=True)
    """,
    )
    result = shell.launch("--nproc-per-node", "2", "--shutdown-timeout", "1", "s.py")
    # Without the option, 30 seconds have 120 lines.
    assert result.returncode == 3 and result.stdout.count("still here") < 80
