"""run_world: results, failures of every kind, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from accel_state import testing
from accel_state.errors import ConfigurationError
from accel_state.ports import is_port_in_use
from accel_state.state import PartialState
from accel_state.testing import WorldError, run_world


@dataclass
class Pair:
    left: int
    right: torch.Tensor


def add_ranks(start: int) -> tuple[int, int]:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def describe_environment() -> dict[str, str | None]:
    keys = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "ACCELERATE_USE_CPU",
        "OMP_NUM_THREADS",
        "EXTRA",
        "DROPPED",
        "OUTER",
    )
    method = multiprocessing.get_start_method(allow_none=True)
    return {key: os.environ.get(key) for key in keys} | {"threads": str(torch.get_num_threads()), "method": method}


def swap(pair: Pair) -> Pair:
    return Pair(pair.left + PartialState().process_index, pair.right * 2)


def restart_group() -> list[int]:
    # One store for all groups: with a store of its own each, at one address, the rank that is ahead may find the store
    # that is about to go, and both wait forever.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    sums = []
    for number in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world_size)
        one = torch.ones(1)
        dist.all_reduce(one)
        sums.append(int(one))
        dist.destroy_process_group()
    return sums


def fail_on(rank: int) -> None:
    dist.barrier()  # everybody has come this far
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def hang_on(rank: int, folder: str) -> None:
    if dist.get_rank() == rank:
        Path(folder, str(rank)).touch()
        time.sleep(600)


def touch_when(path: Path, stands: Callable[[list[Any]], bool]) -> None:
    """Make a file as soon as the stack of the main thread, innermost frame first, is what it is going to stay."""

    def look() -> None:
        while not stands(
            [frame for frame, _ in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])]
        ):
            time.sleep(0.01)
        path.touch()

    threading.Thread(target=look, daemon=True).start()


def _stands_at(frame: Any, function: str, line: int) -> bool:
    return frame.f_code.co_name == function and (line == 0 or frame.f_lineno == line)


def wait_in_collective(absent: int, folder: str) -> None:
    ends = ("all_reduce", 0) if dist.get_rank() != absent else ("wait_in_collective", line_of_absence())
    touch_when(Path(folder, str(dist.get_rank())), lambda stack: any(_stands_at(frame, *ends) for frame in stack))
    if dist.get_rank() == absent:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def line_of_absence() -> int:
    """Where :func:`wait_in_collective` sleeps."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "== absent" in line) + 1


def die_on(rank: int, how: str, folder: str) -> None:
    Path(folder, str(dist.get_rank())).touch()
    if dist.get_rank() == rank:
        while len(os.listdir(folder)) < dist.get_world_size():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


def die_in_the_middle_of_the_result() -> bytes:
    send = Connection._send

    def send_half(connection: Connection, message: Any, *more: Any) -> None:
        send(connection, message[: len(message) // 2], *more)
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send_half
    return b"what arrives in part"


def leave_child_and(pid_file: str, rank: int, what: str) -> None:
    if dist.get_rank() == rank:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pid_file).write_text(str(child.pid))
        if what == "raise":
            raise ValueError("with a child")
        if what == "hang":
            time.sleep(600)


def return_unpicklable() -> object:
    return lambda: None


def exit_by_exception() -> None:
    raise SystemExit(3)


def write_to_descriptors() -> None:
    print(f"printed by {dist.get_rank()}")
    os.write(2, b"written below python\n")


def hang_after_recording_pid(folder: str) -> None:
    (Path(folder) / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def never_leaves() -> int:
    dist.destroy_process_group = lambda *_: time.sleep(600)
    return dist.get_rank()


def own_server() -> int:
    return os.getppid()


def look_at_port() -> tuple[bool, bool]:
    """Whether others may have the port of this world before anybody listens there, and whether rank 0 may."""
    port = int(os.environ["MASTER_PORT"])
    is_others = is_port_in_use(port) or not _is_refused(port)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    return is_others, is_port_in_use(port)


def _is_refused(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return True
        return False


def alive(pid: int) -> bool:
    # A zombie has ended; its parent only has not asked yet.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[Any]], bool]], None]:
    """Have the time limit of run_world count from when something holds: how long ranks take to come up is not what is
    tested.
    """

    def start(condition: Callable[[list[Any]], bool]) -> None:
        collect = testing._collect

        def wait_and_collect(ranks: list[Any], timeout: float) -> list[Any]:
            deadline = time.monotonic() + 90
            while not condition(ranks):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            return collect(ranks, timeout)

        monkeypatch.setattr(testing, "_collect", wait_and_collect)

    return start


def wait_until_dead(pids: list[int], seconds: float = 60) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_world_of_one_has_no_process_group():
    """As torchrun's world of one through PartialState has none."""
    assert run_world(describe_environment, 1)[0]["WORLD_SIZE"] == "1"


def test_ranks_have_the_variables_of_torchrun_and_one_thread(monkeypatch):
    monkeypatch.setenv("OUTER", "set by the test")
    monkeypatch.setenv("DROPPED", "unset in the ranks")
    seen = run_world(describe_environment, 2, env={"EXTRA": "1", "DROPPED": None}, state=False)
    for rank, variables in enumerate(seen):
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "EXTRA": "1",
            "DROPPED": None,
            "OUTER": "set by the test",
            "threads": "1",
            "method": None,  # the platform's default, as in a rank of the launcher
        }


def test_classes_of_the_test_module_travel_both_ways():
    results = run_world(swap, 2, Pair(3, torch.tensor([1.5, 2.0])))
    assert [type(result) for result in results] == [Pair, Pair]
    assert [result.left for result in results] == [3, 4]
    assert torch.equal(results[1].right, torch.tensor([3.0, 4.0]))


def test_a_group_can_be_made_again_in_the_same_world():
    assert run_world(restart_group, 2, state=False) == [[2, 2, 2], [2, 2, 2]]


def test_a_failure_shows_every_rank():
    with pytest.raises(WorldError) as caught:
        run_world(fail_on, 3, 1)
    error = caught.value
    failed = re.match(r"\d of 3 ranks failed: ranks? ([\d, ]+)", str(error))
    assert failed is not None and "1" in failed[1].split(", "), str(error)
    assert "ValueError: boom on 1" in error.reports[1]
    assert "test_testing.py" in error.reports[1]
    assert "_test_worker.py" not in error.reports[1]
    for other in (0, 2):
        assert "in fail_on" in error.reports[other], error.reports[other]
    assert not error.timed_out


def test_a_timeout_says_where_each_rank_stood(tmp_path, clock):
    clock(lambda ranks: len(os.listdir(tmp_path)) == len(ranks))
    began = time.monotonic()
    with pytest.raises(WorldError, match="2 of 2 ranks.*after 0.2 s: ranks 0, 1") as caught:
        run_world(wait_in_collective, 2, 1, str(tmp_path), timeout=0.2)
    assert time.monotonic() - began < 100
    waiting, absent = caught.value.reports
    sleep_line = line_of_absence()
    assert f'File "{__file__}", line {sleep_line} in wait_in_collective' in absent
    assert f'File "{__file__}", line {sleep_line + 1} in wait_in_collective' in waiting
    assert "all_reduce" in waiting
    assert caught.value.timed_out


def test_a_rank_that_is_slow_to_say_where_it_stands_is_heard_out():
    reader, writer = os.pipe()
    lines = [
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in wait\n\nThread 0x2 (most recent call first):\n',
        "",
    ]
    lines[1] = '  File "b.py", line 2 in train\n  File "<string>", line 1 in <module>\n'

    def write_slowly() -> None:
        for line in lines:
            os.write(writer, line.encode())
            time.sleep(5 * testing._QUIET_SECONDS)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    assert testing._read_dump(reader) == "".join(lines)
    thread.join()
    os.close(reader)
    os.close(writer)


def test_a_timeout_tells_finished_ranks_from_others(tmp_path, clock):
    clock(lambda ranks: (tmp_path / "2").exists() and all(rank.results.poll() for rank in ranks[:2]))
    with pytest.raises(WorldError, match="1 of 3 ranks.*after 0.2 s: rank 2") as caught:
        run_world(hang_on, 3, 2, str(tmp_path), timeout=0.2)
    assert caught.value.reports[:2] == ["finished", "finished"]
    assert "in hang_on" in caught.value.reports[2]


@pytest.mark.slow  # waits three seconds for the other rank, three times; an exit by exception is fast
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "ended with exit code 7 without returning"),
        ("SIGKILL", "died of SIGKILL (exit code -9)"),
        ("SIGSEGV", "died of SIGSEGV (exit code -11)"),
    ],
)
def test_a_rank_that_dies_is_reported_with_its_exit_code(tmp_path, how, text):
    with pytest.raises(WorldError, match="rank 0 still ran 3 s") as caught:
        run_world(die_on, 2, 1, how, str(tmp_path))
    assert text in caught.value.reports[1]
    assert "in die_on" in caught.value.reports[0]


def test_a_rank_that_dies_in_the_middle_of_its_result_is_reported_too():
    with pytest.raises(WorldError, match="1 of 1 ranks failed: rank 0") as caught:
        run_world(die_in_the_middle_of_the_result, 1)
    assert "died of SIGKILL (exit code -9)" in caught.value.reports[0]


@pytest.mark.parametrize("what", ["raise", "hang", "return"])
def test_nothing_is_left_running(tmp_path, clock, what):
    pid_file = tmp_path / "pid"
    clock(lambda ranks: pid_file.exists() and pid_file.read_text())
    if what == "return":
        run_world(leave_child_and, 2, str(pid_file), 1, what)
    else:
        with pytest.raises(WorldError):
            run_world(leave_child_and, 2, str(pid_file), 1, what, timeout=0.2)
    assert wait_until_dead([int(pid_file.read_text())]) == []


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("worlds", {__file__!r})
        module = importlib.util.module_from_spec(spec); sys.modules["worlds"] = module; spec.loader.exec_module(module)
        module.run_world(module.hang_after_recording_pid, 2, {str(tmp_path)!r})
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 100
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert wait_until_dead([int(file.read_text()) for file in files]) == []


def test_no_files_are_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_world(add_ranks, 2, 0)
    with pytest.raises(WorldError):
        run_world(fail_on, 2, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(WorldError, match="pickle") as caught:
        run_world(return_unpicklable, 2)
    assert not caught.value.timed_out


def test_an_exit_by_exception_is_a_failure():
    with pytest.raises(WorldError, match="SystemExit: 3"):
        run_world(exit_by_exception, 2)


def test_output_goes_where_the_test_output_goes(capfd):
    run_world(write_to_descriptors, 2)
    captured = capfd.readouterr()
    assert sorted(captured.out.split("\n")) == ["", "printed by 0", "printed by 1"]
    assert captured.err.count("written below python") == 2


def test_a_function_inside_a_function_is_refused():
    def inner() -> None: ...

    for unusable in (inner, lambda: None):
        with pytest.raises(ConfigurationError, match="module-level function"):
            run_world(unusable, 2)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigurationError, match="n=0"):
        run_world(describe_environment, 0)


def test_arguments_that_cannot_be_pickled_are_refused_before_any_rank_starts():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        run_world(add_ranks, 2, lambda: None)


def test_worlds_share_a_server_that_has_imported_torch():
    servers = {server for _ in range(3) for server in run_world(own_server, 2, state=False)}
    assert len(servers) == 1 and not servers & {os.getpid(), 1}


def test_the_port_of_a_world_is_nobody_elses():
    assert run_world(look_at_port, 1, state=False) == [(False, True)]


def test_a_rank_that_cannot_leave_its_group_has_finished_all_the_same(monkeypatch):
    monkeypatch.setattr(testing, "_LEAVE_SECONDS", 0.5)
    assert run_world(never_leaves, 2) == [0, 1]


def test_a_script_runs_its_own_functions_in_a_server_that_imports_what_it_asks_for(tmp_path):
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "helpers.py").write_text("")  # as on pytest's pythonpath
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from accel_state.testing import preload, run_world

        def has_been_imported():
            from accel_state.state import PartialState
            imported = "antigravity" not in sys.modules, {"wave", "helpers"} <= set(sys.modules)
            return PartialState().process_index, *imported

        if __name__ == "__main__":
            sys.path.append("added")
            preload("wave", "helpers", "no_such_module")
            print(run_world(has_been_imported, 2))
            preload("wave")
            try:
                preload("antigravity")
            except ValueError as error:
                print(error)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, cwd=tmp_path)
    assert done.stdout.splitlines()[:1] == ["[(0, True, True), (1, True, True)]"], done.stderr
    assert "preload('antigravity', ...) comes too late: ranks have been started already" in done.stdout
