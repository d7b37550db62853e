"""Distributed tests without a launcher: ``run_world(fn, n)`` runs a function on n gloo ranks and returns their results.

Ranks are forked from a server process that has imported torch, so a world of four starts in a fraction of a second. If
a rank raises, dies or hangs, :class:`WorldError` reports for every rank what happened, or where it is. Each rank leads
a process group, which is killed when the call ends, so no process is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from . import _test_worker
from .env import patch_environment
from .errors import AccelError, ConfigurationError
from .ports import reserved_port

# Modules that every rank imports. Packages import lazily, so the modules inside them are listed too.
_PRELOAD = [
    *("torch", "torch.distributed", "numpy", "accel_state._test_worker", "accel_state.state.partial"),
    *("accel_state.collectives.torch", "accel_state.devices.cpu", "accel_state.environments.torchrun"),
]
_wanted: list[str] = []
_server_has_started = False
_GRACE_SECONDS = 3.0  # after the first failure, for the other ranks to end with their own tracebacks
_LEAVE_SECONDS = 30.0  # to destroy the process group after all ranks have finished
_EXIT_SECONDS = 30.0  # for the exit code of a rank that has closed its connection
_DUMP_SECONDS = 10.0  # between two lines of a stack dump
_QUIET_SECONDS = 0.1  # after the last line of a stack dump


def preload(*modules: str) -> None:
    """Import modules in the server that ranks are forked from, so that not every rank does: for a ``conftest.py``.

    Args:
        *modules: names; those that are not installed are skipped.

    Raises:
        ConfigurationError: the server was started already, without one of these modules.
    """
    late = [name for name in modules if name not in _wanted]
    if late and _server_has_started:
        raise ConfigurationError(
            f"preload({late[0]!r}, ...) comes too late: ranks have been started already. Call it in conftest.py."
        )
    _wanted.extend(late)


class WorldError(AccelError):
    """A rank raised, died, or did not finish in time. The message has a section for every rank.

    Attributes:
        reports: for each rank, its traceback, its exit code, or where it is.
        timed_out: whether the time limit ended the run.
    """

    def __init__(self, summary: str, reports: Sequence[str], timed_out: bool) -> None:
        sections = [f"--- rank {rank} ---\n{report.rstrip()}" for rank, report in enumerate(reports)]
        super().__init__("\n".join([summary, *sections]))
        self.reports: list[str] = list(reports)
        self.timed_out = timed_out


def run_world(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 100,
    env: Mapping[str, str | None] | None = None,
    state: bool = True,
) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` ranks and return their results, by rank.

    Every rank has one thread, the caller's environment, torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) and
    ACCELERATE_USE_CPU=true. ``PartialState(cpu=True)`` exists when ``fn`` is called. The process group is destroyed
    when all ranks have finished.

    Args:
        fn: a module-level function. Its module is loaded from its file, so a test module need not be importable.
        n: number of ranks.
        *args: picklable arguments of ``fn``.
        timeout: seconds until the ranks are killed.
        env: variables to set in the ranks; None unsets one.
        state: False leaves the process group to ``fn``.

    Raises:
        WorldError: a rank raised, died or did not finish in time.
        ConfigurationError: ``fn`` is not a module-level function, or ``n`` is not positive.
    """
    if n < 1:
        raise ConfigurationError(f"n={n} is not a positive number of ranks")
    job = _test_worker.RankJob.of(fn, args, start_state=state)
    with _start(job, n, env or {}) as ranks:
        return _collect(ranks, timeout)


@dataclass
class _Rank:
    """The parent's view of one rank."""

    process: Any
    results: Connection
    go: Connection
    dump: int
    outcome: tuple[str, Any] | None = None
    position: str = ""

    @property
    def finished(self) -> bool:
        return self.outcome is not None and self.outcome[0] == "result"

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome[0] != "result"

    def receive(self) -> None:
        """Receive the rank's result or traceback, or notice that it died."""
        try:
            self.outcome = pickle.loads(self.results.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_EXIT_SECONDS)
            self.outcome = ("death", _describe_exit(self.process.exitcode))

    def kill(self) -> None:
        """Kill the rank and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # The rank may not lead its group yet. Only while it is alive: its process id may be reused afterwards.
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def report(self) -> str:
        """Return what happened to this rank, or where it is."""
        if self.finished:
            return "finished"
        if self.failed and self.outcome is not None:
            return str(self.outcome[1])
        return self.position or "not finished; it had not begun to run the function"


@contextlib.contextmanager
def _start(job: _test_worker.RankJob, n: int, env: Mapping[str, str | None]) -> Iterator[list[_Rank]]:
    """Start the ranks, and end all of their processes at exit."""
    global _server_has_started
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(name for name in ("pytest",) if name in sys.modules), *_wanted])
    if not _server_has_started:
        from multiprocessing import forkserver

        # Up to Python 3.13.0 the server does not take over sys.path, and skips modules on pytest's pythonpath.
        with patch_environment(PYTHONPATH=os.pathsep.join(entry or os.getcwd() for entry in sys.path)):
            forkserver.ensure_running()
        _server_has_started = True
    ranks: list[_Rank] = []
    # Reserved, so that no other test run uses the port before rank 0 listens.
    with reserved_port() as port:
        try:
            for rank in range(n):
                ranks.append(_start_rank(context, job, _rank_environment(rank, n, port, env)))
            yield ranks
        finally:
            for started in ranks:
                if not started.finished:
                    started.kill()
            for started in ranks:
                started.go.close()
                started.process.join(_LEAVE_SECONDS)
                started.kill()  # also what a finished rank left running
                started.process.join()
                started.results.close()
                os.close(started.dump)


def _start_rank(context: Any, job: _test_worker.RankJob, environment: dict[str, str]) -> _Rank:
    results, results_in_rank = context.Pipe(duplex=False)
    go_in_rank, go = context.Pipe(duplex=False)
    dump, dump_in_rank = os.pipe()
    # stdout and stderr as they are now: the server may have those of an earlier test.
    descriptors = [_test_worker.Descriptor(number) for number in (dump_in_rank, 1, 2)]
    process = context.Process(
        target=_test_worker.main, args=(job, environment, results_in_rank, go_in_rank, *descriptors), daemon=False
    )
    try:
        process.start()
    finally:
        results_in_rank.close()
        go_in_rank.close()
        os.close(dump_in_rank)
    return _Rank(process, results, go, dump)


def _rank_environment(rank: int, world_size: int, port: int, extra: Mapping[str, str | None]) -> dict[str, str]:
    environment: dict[str, str | None] = {
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        **extra,
    }
    return {key: value for key, value in environment.items() if value is not None}


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Wait for every rank's result."""
    deadline = time.monotonic() + timeout
    timed_out = False
    while pending := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.results for rank in pending], max(deadline - time.monotonic(), 0))
        if not ready:
            timed_out = not any(rank.failed for rank in ranks)
            _request_positions(pending)
            break
        for rank in pending:
            if rank.results in ready:
                rank.receive()
                if rank.failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if not all(rank.finished for rank in ranks):
        raise WorldError(_summary(ranks, timeout, timed_out), [rank.report() for rank in ranks], timed_out)
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):  # died after it sent its result
            rank.go.send_bytes(b"leave")
    return [pickle.loads(rank.outcome[1]) for rank in ranks if rank.outcome is not None]


def _summary(ranks: list[_Rank], timeout: float, timed_out: bool) -> str:
    failed = [index for index, rank in enumerate(ranks) if rank.failed]
    pending = [index for index, rank in enumerate(ranks) if rank.outcome is None]
    if timed_out:
        return f"{len(pending)} of {len(ranks)} ranks had not finished after {timeout:g} s: {_numbers(pending)}"
    still = f"; {_numbers(pending)} still ran {_GRACE_SECONDS:g} s after the first failure" if pending else ""
    return f"{len(failed)} of {len(ranks)} ranks failed: {_numbers(failed)}{still}"


def _numbers(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _request_positions(ranks: list[_Rank]) -> None:
    """Have faulthandler dump the stacks of each rank, which works even if the interpreter is blocked."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, _test_worker.DUMP_SIGNAL)
    for rank in ranks:
        text = _read_dump(rank.dump)
        if text:
            shown = _test_worker.readable_dump(text)
            rank.position = f"not finished; it stood at (most recent call first):\n{shown}"


def _read_dump(descriptor: int) -> str:
    """Read a stack dump from a pipe, until its last line or a time-out."""
    text = ""
    while wait([descriptor], _QUIET_SECONDS if _test_worker.is_complete_dump(text) else _DUMP_SECONDS):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        text += chunk.decode(errors="replace")
    return text


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name} (exit code {code}) without an exception"
    return f"ended with exit code {code} without returning"
