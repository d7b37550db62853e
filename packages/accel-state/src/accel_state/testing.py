"""Distributed tests without a launcher: ``run_world(fn, n)`` runs a function on n ranks of one gloo world and returns
what they return.

Ranks are forked from a server process that has imported torch once, so a world of four is up in a fraction of a second.
A rank that raises, dies or hangs makes :class:`WorldError`, which shows for every rank what happened to it, or where it
stood. Nothing stays behind: each rank leads a process group of its own, which is killed when the call ends, however it
ends.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from . import _test_worker
from .errors import AccelError, ConfigurationError
from .ports import reserved_port

# What every rank imports anyway. The packages load their modules on demand, so those that a rank needs are named.
_PRELOAD = [
    *("torch", "torch.distributed", "numpy", "accel_state._test_worker", "accel_state.state.partial"),
    *("accel_state.collectives.torch", "accel_state.devices.cpu", "accel_state.environments.torchrun"),
]
_wanted: list[str] = []
_server_has_started = False
# After the first failure the others get this long to end by themselves: their own tracebacks say more than where they
# stood.
_GRACE_SECONDS = 3.0
# To leave the process group, when all have finished.
_LEAVE_SECONDS = 30.0
# Until the server says how a rank has ended that has closed its connection.
_END_SECONDS = 30.0
# What a rank that is asked where it stands may take between two lines of its answer, and after the last one.
_DUMP_SECONDS = 10.0
_QUIET_SECONDS = 0.1


def preload(*modules: str) -> None:
    """Have the server that ranks are forked from import more modules, so that not every rank does: for a
    ``conftest.py``.

    Args:
        *modules: names; those that are not installed are passed over.

    Raises:
        ConfigurationError: ranks have been started already, and with them the server, without one of these modules.
    """
    late = [name for name in modules if name not in _wanted]
    if late and _server_has_started:
        raise ConfigurationError(
            f"preload({late[0]!r}, ...) comes too late: ranks have been started already. Call it where pytest "
            "collects, in conftest.py."
        )
    _wanted.extend(late)


class WorldError(AccelError):
    """A rank raised, died, or had not finished in time. The message has a section for every rank.

    Attributes:
        reports: what happened to each rank, by rank: its traceback, its exit code, or where it stood.
        timed_out: whether the time limit ended the run.
    """

    def __init__(self, summary: str, reports: Sequence[str], timed_out: bool) -> None:
        sections = [f"--- rank {rank} ---\n{report.rstrip()}" for rank, report in enumerate(reports)]
        super().__init__("\n".join([summary, *sections]))
        self.reports = list(reports)
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

    Every rank has one thread, the caller's environment and the variables that torchrun sets (RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...), with ACCELERATE_USE_CPU=true.
    ``PartialState(cpu=True)`` is up when ``fn`` is called. When all ranks have finished, the process group is destroyed
    and the ranks exit.

    Args:
        fn: a function at the top of its module. The module is loaded by its file, so a test module need not be
            importable by name.
        n: number of ranks.
        *args: handed to ``fn``; picklable.
        timeout: seconds until the ranks are killed and WorldError says where each one stood.
        env: variables to set in the ranks; None as value unsets one.
        state: False leaves the process group to ``fn``.

    Raises:
        WorldError: a rank raised, died or was not finished in time.
        ConfigurationError: ``fn`` is not at the top of its module, or ``n`` is not positive.
    """
    if n < 1:
        raise ConfigurationError(f"n={n} ranks cannot run; n must be at least 1")
    job = _test_worker.Job.of(fn, args, start_state=state)
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
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.outcome is not None and self.outcome[0] == "result"

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome[0] != "result"

    def receive(self) -> None:
        """Take the rank's message, or its death."""
        try:
            self.outcome = pickle.loads(self.results.recv_bytes())
        except (EOFError, OSError):  # the latter in the middle of its message
            self.process.join(_END_SECONDS)
            self.outcome = ("death", _describe_exit(self.process.exitcode))

    def kill(self) -> None:
        """Kill the rank and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # The rank leads a group of its own only once it has got that far. What has ended may have left its number to a
        # stranger.
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def report(self) -> str:
        """What to tell about this rank."""
        if self.finished:
            return "finished"
        if self.failed and self.outcome is not None:
            return str(self.outcome[1])
        return "\n".join(self.notes) or "not finished; it had not begun to run the function"


@contextlib.contextmanager
def _start(job: _test_worker.Job, n: int, env: Mapping[str, str | None]) -> Iterator[list[_Rank]]:
    """Start the ranks; at exit none of their processes is left."""
    global _server_has_started
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(name for name in ("pytest",) if name in sys.modules), *_wanted])
    _server_has_started = True
    ranks: list[_Rank] = []
    # Reserved: of the worlds of several test runs, none may find another's port in the seconds until rank 0 listens.
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
                # It has given its result: that it cannot leave its process group is no reason to wait for ever.
                started.process.join(_LEAVE_SECONDS)
                # Also what a rank left running that has finished well.
                started.kill()
                started.process.join()
                started.results.close()
                os.close(started.dump)


def _start_rank(context: Any, job: _test_worker.Job, environment: dict[str, str]) -> _Rank:
    results, results_in_rank = context.Pipe(duplex=False)
    go_in_rank, go = context.Pipe(duplex=False)
    dump, dump_in_rank = os.pipe()
    # What a test prints belongs where the test's own output goes now; the server's descriptors may be those of an
    # earlier test.
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
    """The whole environment of a rank."""
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
    """Wait for every rank's message.

    Raises:
        WorldError: see :func:`run_world`.
    """
    deadline = time.monotonic() + timeout
    timed_out = False
    while pending := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.results for rank in pending], max(deadline - time.monotonic(), 0))
        if not ready:
            timed_out = not any(rank.failed for rank in ranks)
            _note_positions(pending)
            break
        for rank in pending:
            if rank.results in ready:
                rank.receive()
                if rank.failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if all(rank.finished for rank in ranks):
        return _results(ranks)
    raise WorldError(_summary(ranks, timeout, timed_out), [rank.report() for rank in ranks], timed_out)


def _results(ranks: list[_Rank]) -> list[Any]:
    """Let the ranks go, and unpack what they returned."""
    for rank in ranks:
        # A rank that has died in the meantime has given its result already.
        with contextlib.suppress(BrokenPipeError):
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


def _note_positions(ranks: list[_Rank]) -> None:
    """Have each rank write where its threads stand, by the signal that faulthandler answers to without the
    interpreter's help.
    """
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, _test_worker.DUMP_SIGNAL)
    for rank in ranks:
        text = _read_dump(rank.dump)
        if text:
            rank.notes.append(
                "not finished; it stood at (most recent call first):\n" + _test_worker.readable_dump(text)
            )


def _read_dump(descriptor: int) -> str:
    """What arrives in a pipe: all that faulthandler writes of a process, however long a busy machine takes over it."""
    text = b""
    # The main thread comes last. After its end only what other versions of Python may add is waited for.
    while wait(
        [descriptor], _QUIET_SECONDS if _test_worker.is_whole_dump(text.decode(errors="replace")) else _DUMP_SECONDS
    ):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        text += chunk
    return text.decode(errors="replace")


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name} (exit code {code}) without an exception"
    return f"ended with exit code {code} without returning"
