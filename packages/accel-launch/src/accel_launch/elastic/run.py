"""Starts the ranks of this machine, waits for them, and tells how they ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions
from accel_state.preemption import Note

from ..external_launcher import announce
from .agent import Agent, LogFolders, parse_tee, quiet_torch_logs
from .preemption import saved_by_all, tell
from .rendezvous import await_main_machine, make_handler, make_parameters, not_met
from .report import RankFailure, first_failure, read_failure
from .signals import SignalWatch, end_groups
from .static_rendezvous import RoundsRendezvous


@dataclass(frozen=True)
class Job:
    """What the agent of this machine starts.

    Attributes:
        entrypoint: an executable, or a function that each rank calls.
        args: its arguments.
        local_processes: ranks on this machine.
        start_method: how a function's processes are made: "fork" or "spawn".
        line_prefix: template of what stands before each line of ``--tee``; None for role and local rank.
        run_id: what the machines of one job call it; None for the default.
        owns_process: see :class:`SignalWatch`.
    """

    entrypoint: str | Callable[..., Any]
    args: Sequence[Any]
    local_processes: int
    num_machines: int
    rendezvous: RendezvousOptions
    debug: bool = False
    start_method: str = "spawn"
    line_prefix: str | None = None
    run_id: str | None = None
    owns_process: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this machine.

    Attributes:
        exit_code: as a shell shows it.
        failure: the rank that failed first, if one did.
        world_size: ranks over all machines.
        results: what the function returned, by rank; empty for executables.
    """

    exit_code: int
    world_size: int = 0
    failure: RankFailure | None = None
    results: dict[int, Any] | None = None


def run_job(job: Job) -> Outcome:
    """Start the ranks of this machine and wait for them.

    Raises:
        ConfigurationError: the rendezvous failed, for a reason that the user can mend.
    """
    try:
        return _run_watched(job)
    except SignalException as error:
        # Before there was anything to end, or after everything had ended.
        return Outcome(128 + error.sigval)


def _run_watched(job: Job) -> Outcome:
    parameters = make_parameters(job.rendezvous, job.num_machines, job.run_id)
    show_logs = job.debug or "LOGLEVEL" in os.environ
    with (
        contextlib.nullcontext() if show_logs else quiet_torch_logs(),
        SignalWatch(job.owns_process) as watch,
        _log_folder(job.rendezvous.log_dir) as folder,
    ):
        logs = LogFolders(folder, parse_tee(job.rendezvous.tee), _restart_note(job.rendezvous.max_restarts))
        try:
            await_main_machine(job.rendezvous, parameters)
            forks = callable(job.entrypoint) and job.start_method == "fork"
            spec = WorkerSpec(
                role=job.rendezvous.role,
                local_world_size=job.local_processes,
                entrypoint=job.entrypoint,
                args=tuple(job.args),
                rdzv_handler=make_handler(job.rendezvous, parameters, forks=forks),
                max_restarts=job.rendezvous.max_restarts,
                monitor_interval=job.rendezvous.monitor_interval,
                local_addr=parameters.local_addr,
            )
            return _run_agent(Agent(spec, logs, watch, job.start_method, job.line_prefix), logs)
        except SignalException as error:
            return _preempted(logs) or Outcome(128 + error.sigval)
        except (RendezvousError, DistError, TimeoutError) as error:
            raise ConfigurationError(_rendezvous_message(parameters, bool(logs.folders), error)) from None


def _run_agent(agent: Agent, logs: LogFolders) -> Outcome:
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        result = _result(agent)
        if result.is_failed():
            agent.post_failure()
            end_groups(agent.pids())
    except BaseException:
        agent.post_failure()
        end_groups(agent.pids())
        if isinstance(handler, RoundsRendezvous):
            handler.shutdown()  # torch's would call into a store that may be gone
        raise
    handler.shutdown()
    return _outcome(agent, result, logs)


def _result(agent: Agent) -> RunResult:
    try:
        result = agent.run()
    except RendezvousClosedError:
        if agent.last_failure is None:
            raise
        # They were to be started again, but another machine has ended meanwhile.
        return agent.last_failure
    if result is None:
        raise ConfigurationError(
            "the rendezvous was closed by another machine before this one joined. Start all machines again."
        )
    return result


def _outcome(agent: Agent, result: RunResult, logs: LogFolders) -> Outcome:
    world_size = int(agent.get_worker_group().workers[0].world_size)
    if result.is_failed():
        preempted = _preempted(logs, world_size)
        if preempted is not None:
            return preempted
    if agent.failed_elsewhere:
        machines = ", ".join(str(rank) for rank in agent.failed_elsewhere)
        what = "were ended" if result.is_failed() else "succeeded"
        print(
            f"accel launch: the processes of this machine {what}; those of machine rank {machines} failed.",
            file=sys.stderr,
        )
        return Outcome(1, world_size)
    if result.is_failed():
        first = first_failure(_failures(agent, result, logs))
        return Outcome(first.exit_code, world_size, first)
    return Outcome(0, world_size, results=dict(result.return_values))


def _preempted(logs: LogFolders, world_size: int = 0) -> Outcome | None:
    """The outcome of ranks that saved the training because they were told to end; None if they did not."""
    note = saved_by_all(logs.folders)
    if note is None:
        return None
    tell(note)
    return Outcome(note.exit_code, world_size)


def _failures(agent: Agent, result: RunResult, logs: LogFolders) -> Iterator[RankFailure]:
    """Ranks that torch saw fail, and those that reported a failure while torch was looking at another."""
    for worker in agent.get_worker_group().workers:
        seen = result.failures.get(worker.global_rank)
        exit_code = seen.exitcode if seen is not None else 0
        pid = seen.pid if seen is not None else worker.id
        failure = read_failure(worker.global_rank, worker.local_rank, pid, exit_code, logs.folders[worker.local_rank])
        if failure.exit_code:
            yield failure


def report(outcome: Outcome) -> None:
    """Print what failed to stderr, if anything did."""
    if outcome.failure is not None:
        announce(outcome.failure, outcome.world_size)


def _restart_note(max_restarts: int) -> Callable[[int, Note | None], None]:
    def note(restart: int, saved: Note | None) -> None:
        again = f"tarting all processes again (restart {restart} of {max_restarts})"
        if saved is not None:
            tell(saved, f"S{again}")
            return
        print(f"accel launch: a process failed or machines changed; s{again}", file=sys.stderr)

    return note


def _rendezvous_message(parameters: RendezvousParameters, started: bool, error: Exception) -> str:
    # C++ puts a stack behind the first line.
    reason = str(error).split("\n", 1)[0]
    if started:
        return (
            f"the connection to the rendezvous at {parameters.endpoint} was lost, so the processes of this machine "
            f"were ended: {reason}"
        )
    return not_met(parameters, reason)


@contextlib.contextmanager
def _log_folder(asked: str | None) -> Iterator[str]:
    """The folder for logs and reports; a temporary one is removed at the end."""
    if asked is not None:
        yield asked
        return
    folder = tempfile.mkdtemp(prefix="accel_launch_")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
