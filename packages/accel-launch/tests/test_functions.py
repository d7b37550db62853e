"""Launching functions, and launching scripts from Python: each in a session of its own, as a notebook would be."""

from __future__ import annotations

import pytest


@pytest.fixture
def session(shell):
    """Run code in a fresh interpreter, and return what it printed; it must succeed."""

    def run(code: str) -> list[str]:
        result = shell.python(code)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout.splitlines()

    return run


def test_debug_launcher(session) -> None:
    """A closure over a value that cannot be pickled, after the parent has used its threads and has a state of its own."""
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
                print(label, state.num_processes, value.item(), state.device, os.environ["ACCELERATE_USE_CPU"], flush=True)

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


def test_what_the_function_launchers_refuse(session) -> None:
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
        refused(notebook_launcher, num_processes=2, mixed_precision="fp61")
        refused(notebook_launcher, num_processes=2, node_rank=1)
        refused(notebook_launcher, num_processes=2, use_port="many")
        refused(notebook_launcher, num_processes=2, rdzv_backend="etcd")
        refused(notebook_launcher, num_processes=2, max_restarts=-1)
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
        "mixed_precision: 'fp61' is not one of",
        "node_rank=1 with num_nodes=1",
        "--main_process_port: 'many'",
        "--rdzv_backend: 'etcd' is not one of static, c10d",
        "--max_restarts: -1",
        "an Accelerator (or PartialState) exists already",
        "notebook_launcher is called in a process that already is rank 0 of 1",
        "debug_launcher is called in a process that already is rank 0 of 1",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line


def test_cuda_in_use_names_the_culprit(shell) -> None:
    if shell.python("import torch; assert torch.cuda.is_available()").returncode:
        pytest.skip("needs a CUDA device")
    result = shell.python("""
        import torch
        from accel_launch import notebook_launcher
        weights = torch.ones(3, device="cuda")
        notebook_launcher(print, (), num_processes=2)
    """)
    assert "CUDA is initialised in this session already" in result.stderr and "On a GPU: weights." in result.stderr


def test_launch_from_python(session, shell) -> None:
    shell.write("s.py", "import os, sys; print(os.environ['ACCELERATE_MIXED_PRECISION'], sys.argv[1:], flush=True); sys.exit(5)")
    lines = session("""
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
    assert lines[0] == "bf16 ['--num_processes', '9']" and lines[1] == "5"
    assert lines[2] == "--num_processes: 0 is not an integer of at least 1"
    assert lines[3].startswith("nproc: no such option")
