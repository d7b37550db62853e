"""Starts the ranks of this machine, waits for them, and reports how they ended."""

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

from .agent import Agent, LogDirectories, parse_tee, quiet_torch_logs
from .preemption import report_saved, saved_by_all
from .rendezvous import make_handler, make_parameters, not_met, wait_for_main_machine
from .report import RankFailure, first_failure, has_ended, read_failure, with_hint
from .signals import SignalWatch, end_groups
from .static_rendezvous import StaticRendezvous


@dataclass(frozen=True)
class ElasticJob:
    """What the agent of this machine starts."""

    entrypoint: str | Callable[..., Any]  # an executable, or a function that each rank calls
    args: Sequence[Any]  # its arguments
    local_processes: int  # ranks on this machine
    num_machines: int  # machines
    rendezvous: RendezvousOptions  # how they meet
    debug: bool = False  # whether the agent's log is shown
    start_method: str = "spawn"  # how processes of a function are created: "fork" or "spawn"
    line_prefix: str | None = None  # template of the prefix of each line of ``--tee``; None for role and local rank
    run_id: str | None = None  # id of the job, the same on all machines; None for the default
    owns_process: bool = True  # see :class:`SignalWatch`


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this machine."""

    exit_code: int  # as a shell shows it
    world_size: int = 0  # ranks over all machines
    failure: RankFailure | None = None  # the rank that failed first, or None
    signal: int = 0  # the signal that ended the job, or 0


def run_job(job: ElasticJob) -> Outcome:
    """Start the ranks of this machine and wait for them."""
    try:
        return _run_watched(job)
    except SignalException as error:
        # Received before any rank was started, or after all had ended.
        return Outcome(128 + error.sigval, signal=error.sigval)


def _run_watched(job: ElasticJob) -> Outcome:
    options = job.rendezvous
    parameters = make_parameters(options, job.num_machines, job.run_id)
    show_logs = job.debug or "LOGLEVEL" in os.environ
    with (
        contextlib.nullcontext() if show_logs else quiet_torch_logs(),
        SignalWatch(job.owns_process) as watch,
        _log_directory(options.log_dir) as directory,
    ):
        logs = LogDirectories(directory, parse_tee(options.tee), _restart_note(options.max_restarts))
        try:
            wait_for_main_machine(options, parameters)
            forks = callable(job.entrypoint) and job.start_method == "fork"
            spec = WorkerSpec(
                role=options.role,
                local_world_size=job.local_processes,
                entrypoint=job.entrypoint,
                args=tuple(job.args),
                rdzv_handler=make_handler(options, parameters, forks=forks),
                max_restarts=options.max_restarts,
                monitor_interval=options.monitor_interval,
                local_addr=parameters.local_addr,
            )
            may_shrink = parameters.min_nodes < parameters.max_nodes
            return _run_agent(Agent(spec, logs, watch, job.start_method, job.line_prefix, may_shrink), logs)
        except SignalException as error:
            return _preempted(logs) or Outcome(128 + error.sigval, signal=error.sigval)
        except (RendezvousError, DistError, TimeoutError) as error:
            raise ConfigurationError(_rendezvous_message(parameters, bool(logs.by_rank), error)) from None


def _run_agent(agent: Agent, logs: LogDirectories) -> Outcome:
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        result = _result(agent)
        if result.is_failed():
            agent.post_failure()
            end_groups(agent.pids())
    except BaseException:
        agent.post_failure()
        end_groups(agent.pids())
        if isinstance(handler, StaticRendezvous):
            handler.shutdown()  # torch's handlers would call into a store that may be gone
        raise
    handler.shutdown()
    return _outcome(agent, result, logs)


def _result(agent: Agent) -> RunResult:
    try:
        result = agent.run()
    except RendezvousClosedError:
        if agent.last_failure is None:
            raise
        # A restart was due, but another machine has ended.
        return agent.last_failure
    if result is None:
        raise ConfigurationError(
            "the rendezvous was closed by another machine before this one joined. Start all machines again."
        )
    return result


def _outcome(agent: Agent, result: RunResult, logs: LogDirectories) -> Outcome:
    world_size = int(agent.get_worker_group().workers[0].world_size)
    preempted = _preempted(logs, world_size) if result.is_failed() else None
    if preempted is not None:
        return preempted
    if agent.failed_machines:
        machines = ", ".join(map(str, agent.failed_machines))
        verb = "were ended" if result.is_failed() else "succeeded"
        print(
            f"accel launch: the processes of this machine {verb}; those of machine rank {machines} failed.",
            file=sys.stderr,
        )
        return Outcome(1, world_size)
    if result.is_failed():
        first = first_failure(_failures(agent, result, logs))
        return Outcome(first.exit_code, world_size, with_hint(first, _ended_ranks(agent, logs), world_size))
    return Outcome(0, world_size)


def _preempted(logs: LogDirectories, world_size: int = 0) -> Outcome | None:
    """The outcome of ranks that saved on a signal; None if not all did."""
    note = saved_by_all(logs.by_rank)
    if note is None:
        return None
    report_saved(note)
    return Outcome(note.exit_code, world_size)


def _ended_ranks(agent: Agent, logs: LogDirectories) -> list[int]:
    """Ranks of this machine that had ended without an error before another one failed."""
    workers = agent.get_worker_group().workers
    noted = {worker.global_rank for worker in workers if has_ended(worker.id, logs.by_rank[worker.local_rank])}
    return sorted(noted | set(agent.succeeded))


def _failures(agent: Agent, result: RunResult, logs: LogDirectories) -> Iterator[RankFailure]:
    """Ranks that torch saw fail, and ranks that reported a failure at the same time."""
    for worker in agent.get_worker_group().workers:
        seen = result.failures.get(worker.global_rank)
        exit_code = seen.exitcode if seen is not None else 0
        pid = seen.pid if seen is not None else worker.id
        directory = logs.by_rank[worker.local_rank]
        failure = read_failure(worker.global_rank, worker.local_rank, pid, exit_code, directory)
        if failure.exit_code:
            yield failure


def _restart_note(max_restarts: int) -> Callable[[int, Note | None], None]:
    def note(restart: int, saved: Note | None) -> None:
        text = f"tarting all processes again (restart {restart} of {max_restarts})"
        if saved is not None:
            report_saved(saved, f"S{text}")
            return
        print(f"accel launch: a process failed or machines changed; s{text}", file=sys.stderr)

    return note


def _rendezvous_message(parameters: RendezvousParameters, started: bool, error: Exception) -> str:
    # Errors of C++ have a stack trace after the first line.
    reason = str(error).split("\n", 1)[0]
    if started:
        return (
            f"the connection to the rendezvous at {parameters.endpoint} was lost, so the processes of this machine "
            f"were ended: {reason}"
        )
    return not_met(parameters, reason)


@contextlib.contextmanager
def _log_directory(path: str | None) -> Iterator[str]:
    """The directory for logs and reports; by default a temporary one."""
    if path is not None:
        yield path
        return
    directory = tempfile.mkdtemp(prefix="accel_launch_")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
