"""Several processes: a working world, failure reports, output and restarts."""

from __future__ import annotations

import io
import json
import os
import re
import time

import pytest

from accel_launch.elastic.output import Streams, Tee

ALL_REDUCE = """
import json, os, sys
import torch
import torch.distributed as dist
from accel_state import PartialState
state = PartialState()
values = torch.arange(4, dtype=torch.float64) * (dist.get_rank() + 1)
dist.all_reduce(values)
names = ("ACCELERATE_", "OMP_", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_NAME")
report = {"sum": values.tolist(), "argv": sys.argv, "cores": sorted(os.sched_getaffinity(0)), "backend": state.backend}
report["env"] = {k: v for k, v in os.environ.items() if k.startswith(names)}
with open(f"rank{dist.get_rank()}.json", "w") as file:
    json.dump(report, file)
dist.barrier()
dist.destroy_process_group()
"""


def read_ranks(shell, world_size: int) -> list[dict]:
    return [json.loads((shell.folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def test_two_ranks_reduce_and_get_their_settings_and_cores(shell) -> None:
    shell.write("s.py", ALL_REDUCE)
    words = "--num_processes 2 --mixed_precision bf16 --enable_cpu_affinity s.py --flag".split()
    result = shell.launch(*words, "${local_rank} $$", "--", "--num_processes")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    reports = read_ranks(shell, 2)
    for rank, report in enumerate(reports):
        assert report["sum"] == [0, 3, 6, 9] and report["backend"] == "gloo"
        assert report["argv"] == ["s.py", "--flag", "${local_rank} $$", "--", "--num_processes"]
        env = report["env"]
        assert int(env.pop("OMP_NUM_THREADS")) >= 1
        assert env == {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_CPU_AFFINITY": "true",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "2",
            "ROLE_NAME": "default",
        }
    first, second = (set(report["cores"]) for report in reports)
    assert first | second == os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1
    assert not os.listdir(shell.env["TMPDIR"]), "nothing is left behind"


def test_two_default_launches_on_one_host(shell, started) -> None:
    """P28: each waits for the other one, so they run at the same time, with a store of its own."""
    script = """
    import os, pathlib, socket, sys, time
    mine, other = sys.argv[1:]
    pathlib.Path(mine + os.environ["RANK"]).write_text("")
    deadline = time.monotonic() + 90
    while not all(pathlib.Path(name + rank).exists() for name in (mine, other) for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    main = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    socket.create_connection(main, 90).close()
    print(mine, *main, os.environ["WORLD_SIZE"])
    """
    shell.write("s.py", script)
    both = [
        started(shell.fork("launch", "--cpu", "--num_processes", "2", *words))
        for words in (("s.py", "a", "b"), ("--main_process_port", "0", "s.py", "b", "a"))
    ]
    outputs = [one.communicate(timeout=110) for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    for name, (line, same) in zip("ab", lines, strict=True):
        assert line == same and re.fullmatch(rf"{name} \S+ \d+ 2", line)
    assert lines[0][0][2:] != lines[1][0][2:]


def test_the_first_failing_ranks_traceback_ends_the_output(shell) -> None:
    """P30, with the other rank failing too, as a consequence, in its collective."""
    shell.write(
        "s.py",
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        def train():
            raise ValueError("boom")
        if dist.get_rank() == 1:
            train()
        dist.barrier()
    """,
    )
    result = shell.launch("--num_processes", "2", "s.py")
    assert result.returncode == 1
    end = result.stderr[result.stderr.rindex("accel launch: ") :]
    assert re.fullmatch(
        r"accel launch: rank 1 of 2 failed first \(local rank 1 on \S+, pid \d+\), exit code 1:\nTraceback \(most "
        r"recent call last\):\n"
        r'  File "\S+/s.py", line 7, in <module>\n    train\(\)\n(?:    ~+\^+\n)?'
        r'  File "\S+/s.py", line 5, in train\n    raise ValueError\("boom"\)\nValueError: boom\n',
        end,
    ), end
    assert (
        "ChildFailedError" not in result.stderr
        and "torchelastic" not in result.stderr
        and "worker.py" not in result.stderr
    )
    assert not os.listdir(shell.env["TMPDIR"])


# Raises in both ranks: the launcher ends the other one when the first has failed.
TOGETHER = """
import os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("here" + os.environ["RANK"]).touch()
while not (os.path.exists("here0") and os.path.exists("here1")):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("message", "tracebacks"), [("'boom'", 2), ("os.environ['RANK']", 3)])
@pytest.mark.parametrize("options", [[], ["--tee", "3"]], ids=["screen", "files"])
def test_the_same_error_of_several_ranks_is_shown_once_before_the_end(
    shell, message: str, tracebacks: int, options: list[str]
) -> None:
    """Each rank's file has its own traceback; on the screen they follow each other."""
    shell.write("s.py", f"{TOGETHER}raise ValueError({message})\n")
    result = shell.launch("--num_processes", "2", *options, "s.py")
    assert result.returncode == 1
    assert result.stderr.count("Traceback (most recent call last)") == (3 if options else tracebacks), result.stderr
    repeats = re.findall(r"^\[rank[01]\]: the same error as on rank [01]$", result.stderr, re.MULTILINE)
    assert len(repeats) == (0 if options else 3 - tracebacks)


def test_the_scripts_hook_for_exceptions_runs_in_every_rank(shell) -> None:
    """A tracker marks its run as failed there."""
    shell.write(
        "s.py",
        TOGETHER
        + """
def hook(*error):
    pathlib.Path("failed" + os.environ["RANK"]).touch()
    sys.__excepthook__(*error)

sys.excepthook = hook
raise ValueError("boom")
""",
    )
    result = shell.launch("--num_processes", "2", "s.py")
    assert result.stderr.count(": the same error as on rank") == 1, result.stderr
    assert {"failed0", "failed1"} <= {*os.listdir(shell.folder)}


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(7)", 7, r"rank 1 of 2 ended first with exit code 7 \(local rank 1 on \S+, pid \d+\)\."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"rank 1 of 2 was ended by SIGKILL .* exit code 137\..*memory.*"),
    ],
    ids=["sys.exit", "SIGKILL"],
)
def test_exit_codes_pass_through(shell, ending, code, message) -> None:
    shell.write("s.py", f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(50)\n")
    result = shell.launch("--num_processes", "2", "--debug", "s.py")
    assert result.returncode == code and "failed (exitcode: " in result.stderr, "the agent's log, with --debug"
    assert re.fullmatch(f"accel launch: {message}", result.stderr.splitlines()[-1]), result.stderr


def test_executable_ranks(shell) -> None:
    # A rank that fails ends the other one, which must have printed its line by then.
    both = "touch said$RANK\nuntil [ -e said0 -a -e said1 ]; do sleep 0.05; done\n"
    shell.write("run.sh", f'#!/bin/bash\necho "rank $RANK of $WORLD_SIZE $1"\n{both}exit $1\n').chmod(0o755)
    result = shell.launch("--num_processes", "2", "--no_python", "run.sh", "4")
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2 4", "rank 1 of 2 4"] and result.returncode == 4
    assert "ended first with exit code 4" in result.stderr


@pytest.mark.slow  # ranks spawn children; test_executable_ranks and the tests of one process are fast
def test_module_ranks_and_what_main_is(shell) -> None:
    """A rank's script is the module __main__, as far as pickle, inspect and spawned children can tell."""
    code = """
    import __main__, inspect, multiprocessing, pickle, sys
    class Thing:
        pass
    def double(value):
        return 2 * value
    if __name__ == "__main__":
        assert __main__ is sys.modules["__main__"] and __main__.Thing is Thing
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        assert "2 * value" in inspect.getsource(double)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [21])[0], sys.argv[1:], sys.path[0], __spec__ and __spec__.name)
    """
    shell.write("pkg/__init__.py", "")
    shell.write("pkg/mod.py", code)
    result = shell.launch("--num_processes", "2", "-m", "pkg.mod", "-m")
    assert result.stdout.splitlines() == [f"42 ['-m'] {shell.folder} pkg.mod"] * 2, result.stderr
    result = shell.launch("--num_processes", "2", "pkg/mod.py", "x")
    assert result.stdout.splitlines() == [f"42 ['x'] {shell.folder}/pkg None"] * 2, result.stderr


def test_output_streams_live(shell, started) -> None:
    shell.write("s.py", "import time; print('first'); time.sleep(300)")
    launcher = started(shell.fork("launch", "--cpu", "--num_processes", "2", "s.py"))
    assert [launcher.stdout.readline() for _ in range(2)] == ["first\n", "first\n"]
    launcher.terminate()
    assert launcher.wait(60) == 143


def test_restarts(shell) -> None:
    shell.write(
        "s.py",
        """
        import os, sys
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        open(f"start{attempt}.{os.environ['RANK']}", "w").close()
        sys.exit(6 if attempt < int(sys.argv[1]) and os.environ["RANK"] == "0" else 0)
    """,
    )
    words = ["--num_processes", "2", "--monitor_interval", "0.05", "--max_restarts", "1"]
    result = shell.launch(*words, "s.py", "2")
    assert result.returncode == 6 and "rank 0 of 2 ended first with exit code 6" in result.stderr.splitlines()[-1]
    assert result.stderr.count("starting all processes again (restart 1 of 1)") == 1
    starts = {file for file in os.listdir(shell.folder) if file.startswith("start")}
    # Rank 1 may be ended because of rank 0 before it writes its file.
    assert {"start0.0", "start1.0"} <= starts <= {f"start{attempt}.{rank}" for attempt in range(2) for rank in range(2)}


def test_the_last_line_of_output_is_not_lost(tmp_path) -> None:
    """The rank prints and ends between the copying thread's last read and its check of the rank."""
    screen = io.StringIO(), io.StringIO()
    tee = Tee(tmp_path, Streams(3, 3), "[rank]:", screen)
    tee.start()
    time.sleep(0.3)
    (tmp_path / "stdout.log").write_text("first\nlast")
    tee.close()
    assert (screen[0].getvalue(), screen[1].getvalue()) == ("[rank]:first\n[rank]:last", "")


def test_the_output_of_a_single_process_is_kept_too(shell) -> None:
    shell.write("s.py", "import sys; print('out'); sys.exit('gone')")
    result = shell.launch("--num_processes", "1", "--tee", "3", "--log_dir", "logs", "s.py")
    assert (result.returncode, result.stdout) == (1, "[default0]:out\n")
    texts = {path.name: path.read_text() for path in (shell.folder / "logs").rglob("*.log")}
    assert texts == {"stdout.log": "out\n", "stderr.log": "gone\n"}


def test_a_requested_port_is_used(shell, free_port) -> None:
    """By the other rendezvous; the printed commands of test_dry_run.py are compared with ranks of the static one."""
    port = free_port()
    shell.write("s.py", "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    result = shell.launch("--num_processes", "2", "--main_process_port", str(port), "--rdzv_backend", "c10d", "s.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"127.0.0.1 {port}"] * 2


@pytest.mark.slow  # two starts of ranks that import torch; the first failing rank's traceback has a fast test
def test_the_launcher_says_what_ranks_cannot_know(shell) -> None:
    """A rank that ended before another one's collective failed; and that gloo aborts on tensors of other sizes."""
    shell.write(
        "s.py",
        """
        import sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if sys.argv[1] == "sizes":
            dist.all_reduce(torch.ones(3 + 100 * dist.get_rank()))
        for step in range(3 + dist.get_rank()):
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    """,
    )
    early = shell.launch("--num_processes", "2", "s.py", "steps")
    assert early.returncode == 1
    assert early.stderr.splitlines()[-1].startswith("accel launch: rank 0 had already ended, without an error")
    sizes = shell.launch("--num_processes", "2", "s.py", "sizes")
    assert sizes.returncode and "pad_across_processes" in sizes.stderr.splitlines()[-1], sizes.stderr


def test_a_death_after_the_end_of_the_script_is_not_put_down_to_its_loop(shell) -> None:
    shell.write(
        "s.py",
        """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(os.abort)
        else:
            time.sleep(0.1)
    """,
    )
    result = shell.launch("--num_processes", "2", "s.py")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 134 and last.startswith("accel launch: rank 1 of 2 was ended by SIGABRT"), result.stderr
    assert "the script of rank 1 had already ended" in last and "loop" not in last


def test_no_name_is_resolved_and_exit_handlers_run(shell) -> None:
    """A name server that does not answer would delay the launcher for minutes. The launcher skips the finalization of
    torch, but runs registered exit handlers.
    """
    shell.write("s.py", "import sys; print('started', flush=True); sys.exit(4)")
    result = shell.forked_python("""
        import atexit, socket, sys
        def refuse(*args):
            raise AssertionError("the name service was asked")
        socket.getfqdn = socket.gethostbyaddr = refuse
        from accel_launch.cli import main
        atexit.register(print, "at exit")
        sys.argv[1:] = ["launch", "--cpu", "--num_processes", "2", "s.py"]
        sys.exit(main())
    """)
    # One rank may be ended before it prints.
    *started, last = result.stdout.splitlines()
    assert result.returncode == 4 and {*started} == {"started"} and last == "at exit", result.stderr
