"""run_world: results, failures of every kind, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from accel_state.errors import ConfigurationError
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
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "EXTRA", "DROPPED", "OUTER")
    return {key: os.environ.get(key) for key in keys} | {"threads": str(torch.get_num_threads())}


def swap(pair: Pair) -> Pair:
    return Pair(pair.left + PartialState().process_index, pair.right * 2)


def restart_group() -> list[int]:
    # One store for all groups: with a store of its own each, at one address, the rank that is ahead may find the store that is about
    # to go, and both wait for ever.
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
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def wait_in_collective(absent: int) -> None:
    if dist.get_rank() == absent:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


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


def alive(pid: int) -> bool:
    # A zombie has ended; its parent only has not asked yet.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_dead(pids: list[int], seconds: float = 10) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_back_by_rank(n):
    expected = sum(range(n)) + 5 * n
    if n == 1:
        # A world of one has no process group, as torchrun's world of one through PartialState has none.
        assert run_world(describe_environment, 1)[0]["WORLD_SIZE"] == "1"
        return
    assert run_world(add_ranks, n, 5) == [(rank, expected) for rank in range(n)]


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
    assert "rank 1" in str(error).splitlines()[0] or "ranks 0, 1, 2" in str(error).splitlines()[0]
    assert "ValueError: boom on 1" in error.reports[1]
    assert "test_testing.py" in error.reports[1]
    assert "_rank_process.py" not in error.reports[1]
    for other in (0, 2):
        assert "in fail_on" in error.reports[other], error.reports[other]
    assert not error.timed_out


def test_a_timeout_says_where_each_rank_stood():
    began = time.monotonic()
    with pytest.raises(WorldError, match=r"2 of 2 ranks had not finished after 2 s: ranks 0, 1") as caught:
        run_world(wait_in_collective, 2, 1, timeout=2)
    assert time.monotonic() - began < 10
    waiting, absent = caught.value.reports
    lines = Path(__file__).read_text().splitlines()
    sleep_line = next(number for number, line in enumerate(lines, 1) if "== absent" in line) + 1
    assert f'File "{__file__}", line {sleep_line} in wait_in_collective' in absent
    assert f'File "{__file__}", line {sleep_line + 1} in wait_in_collective' in waiting
    assert "all_reduce" in waiting
    assert caught.value.timed_out


def test_a_timeout_tells_finished_ranks_from_others():
    with pytest.raises(WorldError, match=r"1 of 3 ranks had not finished after 1 s: rank 2") as caught:
        run_world(hang_on, 3, 2, timeout=1)
    assert caught.value.reports[:2] == ["finished", "finished"]
    assert "in hang_on" in caught.value.reports[2]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "ended with exit code 7 without returning"),
        ("SIGKILL", "died of SIGKILL (exit code -9)"),
        ("SIGSEGV", "died of SIGSEGV (exit code -11)"),
    ],
)
def test_a_rank_that_dies_is_reported_with_its_exit_code(how, text):
    with pytest.raises(WorldError, match="rank 0 still ran 3 s after the first failure") as caught:
        run_world(die_on, 2, 1, how)
    assert text in caught.value.reports[1]
    assert "in die_on" in caught.value.reports[0]


@pytest.mark.parametrize("what", ["raise", "hang", "return"])
def test_nothing_is_left_running(tmp_path, what):
    pid_file = tmp_path / "pid"
    if what == "return":
        run_world(leave_child_and, 2, str(pid_file), 1, what)
    else:
        with pytest.raises(WorldError):
            run_world(leave_child_and, 2, str(pid_file), 1, what, timeout=3)
    assert wait_until_dead([int(pid_file.read_text())]) == []


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("worlds", {__file__!r})
        module = importlib.util.module_from_spec(spec); sys.modules["worlds"] = module; spec.loader.exec_module(module)
        module.run_world(module.hang_after_recording_pid, 2, {str(tmp_path)!r})
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
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
        with pytest.raises(ConfigurationError, match="at the top of a module"):
            run_world(unusable, 2)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigurationError, match="n=0"):
        run_world(describe_environment, 0)


def test_arguments_that_cannot_be_pickled_are_refused_before_any_rank_starts():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        run_world(add_ranks, 2, lambda: None)


def test_a_script_can_run_its_own_functions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from accel_state.testing import run_world

        def rank_of_world():
            from accel_state.state import PartialState
            return PartialState().process_index

        if __name__ == "__main__":
            print(run_world(rank_of_world, 2))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_worlds_may_run_one_after_another_quickly():
    began = time.monotonic()
    for _ in range(5):
        assert run_world(add_ranks, 2, 0) == [(0, 1), (1, 1)]
    assert time.monotonic() - began < 20
