"""Launching functions, and launching scripts from Python: each in a process of its own, like a notebook."""

from __future__ import annotations

import pytest

from accel_launch.accelerators.registry import find_visible
from accel_state.env import all_variables


@pytest.fixture
def session(shell):
    """Run code where torch is imported already, and return what it printed; it must succeed."""

    def run(code: str) -> list[str]:
        result = shell.forked_python(code)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout.splitlines()

    return run


def test_debug_launcher(session) -> None:
    """A closure over a value that cannot be pickled, after the parent has used threads and created a state."""
    lines = session("""
        import os, signal, threading
        import torch
        from accel_launch import debug_launcher
        from accel_state import PartialState

        matrix = torch.ones(700, 700)
        assert (matrix @ matrix)[0, 0] == 700
        assert PartialState(cpu=True).num_processes == 1
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        lock, before = threading.Lock(), dict(os.environ)

        def sum_ranks(factor, label):
            state = PartialState()
            with lock:
                value = (matrix @ matrix)[0, 0] * (state.process_index + 1) * factor
            torch.distributed.all_reduce(value)
            if state.is_last_process:
                use_cpu = os.environ["ACCELERATE_USE_CPU"]
                print(label, state.num_processes, value.item(), state.device, use_cpu, flush=True)

        debug_launcher(sum_ranks, (2, "sum"))
        debug_launcher(lambda: sum_ranks(1, "three"), num_processes=3)
        assert dict(os.environ) == before and PartialState().num_processes == 1
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    """)
    assert lines == ["sum 2 4200.0 cpu true", "three 3 4200.0 cpu true"]


def test_a_failing_function_raises_with_its_traceback(session) -> None:
    lines = session("""
        import os
        from accel_launch import LaunchError, debug_launcher

        def fail(kind):
            if os.environ["RANK"] == "1":
                if kind == "raise":
                    raise ValueError("boom")
                os._exit(9)
            import time
            time.sleep(50)

        for kind in ("raise", "exit"):
            try:
                debug_launcher(fail, (kind,))
            except LaunchError as error:
                print(str(error).splitlines()[0].split(" (")[0], "|", str(error).splitlines()[-1])
    """)
    assert lines[0] == "accel launch: rank 1 of 2 failed first | ValueError: boom"
    assert lines[1].startswith("accel launch: rank 1 of 2 ended first with exit code 9 | ")


@pytest.mark.slow  # ten starts of two ranks; the tests around it have fewer
def test_a_function_that_exits_its_process(session) -> None:
    """torch gets no result from four of these, and would wait for it forever."""
    lines = session("""
        import os, sys
        from accel_launch import LaunchError, debug_launcher

        def interrupt():
            raise KeyboardInterrupt

        ends = {"exit()": sys.exit, "exit(0)": lambda: sys.exit(0), "exit(3)": lambda: sys.exit(3)}
        ends["os._exit(0)"] = lambda: os._exit(0)
        ends["interrupt"] = interrupt
        for name, end in ends.items():
            for ranks in ("1", "01"):
                try:
                    debug_launcher(lambda: end() if os.environ["RANK"] in ranks else None)
                    print(name, ranks, "well", flush=True)
                except LaunchError as error:
                    first, *_, last = [*str(error).splitlines(), str(error).splitlines()[-1]]
                    print(name, ranks, first.split(" of 2 ")[1].split(" (")[0], "|", last[-11:])
    """)
    assert lines[:4] == ["exit() 1 well", "exit() 01 well", "exit(0) 1 well", "exit(0) 01 well"]
    assert lines[4:6] == ["exit(3) 1 failed first | stemExit: 3", "exit(3) 01 failed first | stemExit: 3"]
    assert lines[6:8] == ["os._exit(0) 1 well", "os._exit(0) 01 well"]
    assert [line.rpartition(" | ")[0] for line in lines[8:]] == [
        "interrupt 1 was ended by SIGINT",
        "interrupt 01 was ended by SIGINT",
    ]


def test_a_rank_that_has_just_been_forked_can_be_ended(session) -> None:
    """The launcher's handler for SIGTERM, inherited, would keep the signal forever."""
    lines = session("""
        import os, pathlib, signal, time
        from accel_launch import LaunchError, debug_launcher
        from accel_launch.elastic import agent

        def initialize(launcher):
            if os.environ["RANK"] == "0":
                pathlib.Path("begins").touch()
                try:
                    time.sleep(100)
                except Exception as error:
                    print("swallowed", error, flush=True)

        def fail():
            while not pathlib.Path("begins").exists():
                time.sleep(0.05)
            raise ValueError("boom")

        agent.die_with_launcher = initialize  # the first thing that a rank does
        signal.signal(signal.SIGHUP, lambda *_: None)
        try:
            debug_launcher(fail)
        except LaunchError as error:
            print(str(error).splitlines()[-1])
        pid = os.fork()
        if pid == 0:
            os._exit(7 * callable(signal.getsignal(signal.SIGHUP)))
        print("another fork keeps its handlers:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7)
    """)
    assert lines == ["ValueError: boom", "another fork keeps its handlers: True"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_a_rank_without_handlers(session, name: str) -> None:
    """Between the fork and the first thing that the rank does it has the launcher's handler, which would keep the
    signal forever.
    """
    lines = session(f"""
        import os, signal, time
        from multiprocessing.context import ForkProcess
        from accel_launch import LaunchError, debug_launcher

        ranks, start = [], ForkProcess.start
        def start_one(process):
            ranks.append(process)
            start(process)
        ForkProcess.start = start_one
        os.register_at_fork(after_in_child=lambda: len(ranks) == 1 and os.kill(os.getpid(), signal.{name}))
        try:
            debug_launcher(lambda: time.sleep(20 if os.environ["RANK"] == "0" else 0))
        except LaunchError as error:
            print(str(error).split(" (")[0])
    """)
    assert lines == [f"accel launch: rank 0 of 2 was ended by {name}"]


def test_an_interrupt_is_reset_when_the_function_returns(session) -> None:
    # Through a pipe: on a busy disk a new file can take longer than the 30 seconds after which the ranks are killed.
    lines = session("""
        import os, signal, threading, time
        from accel_launch import debug_launcher

        reader, writer = os.pipe()

        def save_when_interrupted():
            try:
                os.write(writer, b"r")
                time.sleep(100)
            except KeyboardInterrupt:
                os.write(writer, b"s")

        def interrupt():
            for _ in range(2):
                os.read(reader, 1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            debug_launcher(save_when_interrupted)
        except KeyboardInterrupt:
            os.set_blocking(reader, False)
            print(os.read(reader, 9))
    """)
    assert lines == ["b'ss'"]


def test_an_interrupt_while_processes_are_started_leaves_none_behind(shell) -> None:
    result = shell.forked_python("""
        import multiprocessing, os, signal, time
        from multiprocessing.context import ForkProcess
        from accel_launch import debug_launcher

        started, start = [], ForkProcess.start
        def start_one(process):
            start(process)
            started.append(process)
            if len(started) == 1:
                os.kill(os.getpid(), signal.SIGINT)
        ForkProcess.start = start_one
        former = signal.getsignal(signal.SIGINT)
        try:
            debug_launcher(lambda: time.sleep(600))
        except KeyboardInterrupt:
            is_former = signal.getsignal(signal.SIGINT) is former
            print("interrupted", len(started), multiprocessing.active_children(), is_former)
        for process in multiprocessing.active_children():
            process.kill()
    """)
    # On stderr: how a rank was interrupted before it had begun.
    assert (result.returncode, result.stdout) == (0, "interrupted 2 [] True\n"), result.stderr


def test_notebook_launcher(session) -> None:
    lines = session("""
        import os
        from accel_launch import notebook_launcher

        def train(value):
            print(value, os.environ.get("WORLD_SIZE", "1"), os.environ["ACCELERATE_MIXED_PRECISION"], flush=True)
            if os.environ.get("RANK") == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and value == "again":
                raise KeyError

        notebook_launcher(train, ("here",), num_processes=1, mixed_precision="bf16")
        assert "ACCELERATE_MIXED_PRECISION" not in os.environ
        notebook_launcher(train, ("both",), num_processes=2, mixed_precision="fp16")
        print("restarting", flush=True)
        import contextlib, io
        with contextlib.redirect_stderr(io.StringIO()) as said:
            notebook_launcher(train, ("again",), num_processes=2, max_restarts=1, use_port=0, rdzv_conf={"timeout": 30})
        assert "starting all processes again (restart 1 of 1)" in said.getvalue()
    """)
    assert lines[0].startswith("Launching training in this process, on ") and lines[1] == "here 1 bf16"
    assert lines[2].startswith("Launching training on 2 ") and lines[3:5] == ["both 2 fp16"] * 2
    restarted = [line for line in lines[lines.index("restarting") :] if line == "again 2 no"]
    assert 3 <= len(restarted) <= 4, lines[5:]


def test_a_precision_in_the_environment_is_overridden_with_a_warning(session) -> None:
    lines = session("""
        import os, warnings
        from accel_launch import debug_launcher, notebook_launcher

        def show():
            if os.environ.get("RANK", "0") == "0":
                print(os.environ["ACCELERATE_MIXED_PRECISION"], flush=True)

        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            notebook_launcher(show, num_processes=1)
            notebook_launcher(show, num_processes=1, mixed_precision="bf16")
            debug_launcher(show)
        print(*(str(warning.message).split(": ")[0] for warning in caught), sep="\\n")
    """)
    text = "ACCELERATE_MIXED_PRECISION=bf16 has no effect"
    assert [line for line in lines if "Launching" not in line] == ["no", "bf16", "no", text, text]


def test_options_that_function_launchers_refuse(session) -> None:
    lines = session("""
        import os
        from accel_launch import debug_launcher, notebook_launcher
        from accel_state.errors import ConfigurationError

        def refused(launcher, *args, **options):
            try:
                launcher(print, args, **options)
            except ConfigurationError as error:
                print(error)

        refused(debug_launcher, num_processes=0)
        refused(notebook_launcher, num_processes="2")
        refused(debug_launcher, num_processes=1000000)
        refused(notebook_launcher, num_processes=2, mixed_precision="fp61")
        refused(notebook_launcher, num_processes=2, node_rank=1)
        refused(notebook_launcher, num_processes=2, use_port="many")
        refused(notebook_launcher, num_processes=2, rdzv_backend="etcd")
        refused(notebook_launcher, num_processes=2, max_restarts=-1)
        refused(notebook_launcher, num_processes=2, num_nodes="2")
        refused(notebook_launcher, num_processes=1, node_rank=3)
        refused(notebook_launcher, num_processes=2, rdzv_conf="timeout=3")
        refused(notebook_launcher, num_processes=2, log_line_prefix_template=5)
        for function, args in ((5, ()), (print, "ab"), (print, 5), (print, {"a": 1})):
            for launcher in (debug_launcher, notebook_launcher):
                try:
                    launcher(function, args)
                except ConfigurationError as error:
                    print(error)
        from accel_state import PartialState
        PartialState(cpu=True)
        refused(notebook_launcher, num_processes=2)
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        refused(notebook_launcher, num_processes=2)
        refused(debug_launcher)
        dist.destroy_process_group()
    """)
    starts = [
        "num_processes=0 is not",
        "num_processes='2' is not",
        "num_processes=1000000: 1000000 processes on this machine",
        "mixed_precision: 'fp61' is not one of",
        "node_rank=1 with num_nodes=1",
        "use_port: 'many'",
        "rdzv_backend: 'etcd' is not one of static, c10d",
        "max_restarts: '-1'",
        "num_nodes='2' is not",
        "node_rank=3 with num_nodes=1",
        "rdzv_conf='timeout=3' is not a mapping",
        "log_line_prefix_template=5 is not text",
        *["function=5 is not a function."] * 2,
        *["args='ab' is not a tuple or list of arguments. For a single one: args=('ab',)."] * 2,
        *["args=5 is not a tuple"] * 2,
        *["args={'a': 1} is not a tuple"] * 2,
        "an Accelerator (or PartialState) exists already",
        "notebook_launcher is called in a process that is rank 0 of 1",
        "debug_launcher is called in a process that is rank 0 of 1",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line


def test_initialised_cuda_names_the_cause(shell) -> None:
    if not find_visible(all_variables()).count:  # asked without torch, whose answer takes a new interpreter
        pytest.skip("needs a CUDA device")
    result = shell.python("""
        import torch
        from accel_launch import notebook_launcher
        weights = torch.ones(3, device="cuda")
        notebook_launcher(print, (), num_processes=2)
    """)
    assert "CUDA is initialised in this session already" in result.stderr and "On a GPU: weights." in result.stderr


def test_launch_from_python(shell) -> None:
    shell.write(
        "s.py", "import os, sys; print(os.environ['ACCELERATE_MIXED_PRECISION'], sys.argv[1:], flush=True); sys.exit(5)"
    )
    result = shell.python("""
        import sys
        from accel_launch import launch
        from accel_state.errors import ConfigurationError
        print(launch("s.py", ["--num_processes", "9"], cpu=True, mixed_precision="bf16", quiet=True), flush=True)
        for options in ({"num_processes": 0}, {"nproc": 2}):
            try:
                launch("s.py", **options)
            except ConfigurationError as error:
                print(error)
        assert "torch" not in sys.modules
    """)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "bf16 ['--num_processes', '9']" and lines[1] == "5"
    assert lines[2] == "--num_processes: '0' is not an integer of at least 1"
    assert lines[3].startswith("nproc: no such option")
