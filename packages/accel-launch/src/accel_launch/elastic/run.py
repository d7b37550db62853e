"""Starts the ranks of this machine, waits for them, and reports how they ended."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from accel_state.errors import ConfigurationError
from accel_state.options.resources import MachineRange

from ..launch_ends import report_ends
from ..network.board import say
from ..network.records import INTERRUPTED, RAISED, Cause
from ..scratch import scratch_directory
from ..supervisor import Interrupted, SignalWatch
from .agent import Agent
from .meeting import ElasticJob, Meetings, RunEnded
from .preemption import report_saved, saved_by_all
from .report import RankFailure, first_failure, has_ended, signal_name, with_hint
from .static_rendezvous import StaticRendezvous

_LOGS = ("torch.distributed.elastic", "accel_launch.agent")


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this machine."""

    exit_code: int  # as a shell shows it
    world_size: int = 0  # ranks over all machines
    failure: RankFailure | None = None  # the rank that failed first, or None
    signal: int = 0  # the signal that ended the job, or 0


def run_job(job: ElasticJob) -> Outcome:
    """Start the ranks of this machine and wait for them."""
    options = job.rendezvous
    with (
        contextlib.nullcontext() if job.debug or "LOGLEVEL" in os.environ else _quiet_logs(),
        SignalWatch(job.owns_process) as watch,
    ):
        try:
            path = options.log_dir
            with scratch_directory() if path is None else contextlib.nullcontext(path) as directory:
                outcome = _run(job, watch, directory)
        except Interrupted as error:
            outcome = Outcome(128 + error.number, signal=error.number)
        if watch.unheeded and not outcome.failure:
            # Received after all ranks had ended.
            return Outcome(128 + watch.unheeded, signal=watch.unheeded)
        return outcome


def _run(job: ElasticJob, watch: SignalWatch, directory: str | Path) -> Outcome:
    if isinstance(job.num_machines, MachineRange):
        # Each kind imports only its own part of torch's rendezvous.
        from .ranged_rendezvous import RangedRendezvous

        meetings: Meetings = RangedRendezvous(job)
    else:
        meetings = StaticRendezvous(job)
    agent = Agent(job, meetings, directory, watch)
    try:
        try:
            failed = agent.run()
            if failed:
                agent.post_failure()
                agent.end_groups()
        except BaseException as error:
            agent.post_failure()
            agent.end_groups()
            meetings.withdraw(_reason(error))
            raise
        meetings.leave()
        return _outcome(agent, failed)
    except RunEnded as error:
        say(f"{error}.")
        return Outcome(0)
    except Interrupted as error:
        return _preempted(agent) or Outcome(128 + error.number, signal=error.number)
    except (RendezvousError, DistError, TimeoutError) as error:
        raise ConfigurationError(_rendezvous_message(job, meetings.place, bool(agent.directories), error)) from None
    finally:
        if agent.ended_at is not None:
            report_ends(agent.directories.values(), agent.ended_at, job.owns_process)


def _reason(error: BaseException) -> Cause:
    """Return the report to the other machines of an error of this launcher."""
    if isinstance(error, Interrupted):
        return Cause(INTERRUPTED, f"ended by {signal_name(error.number)}", 128 + error.number)
    return Cause(RAISED, str(error).split("\n", 1)[0], 2)


def _outcome(agent: Agent, failed: bool) -> Outcome:
    world_size = agent.world_size
    preempted = _preempted(agent, world_size) if failed else None
    if preempted is not None:
        return preempted
    if agent.elsewhere is not None:
        verb = "were ended" if failed else "succeeded"
        say(agent.elsewhere.text)
        say(f"the processes of this machine {verb}.")
        return Outcome(agent.elsewhere.code, world_size)
    if failed:
        first = with_hint(first_failure(agent.failures()), _ended_ranks(agent), world_size)
        if report := agent.hang_report():
            hint = f"{first.hint}\naccel launch: before that, {report}"
            first = replace(first, hint=hint.removeprefix("\naccel launch: "))
        return Outcome(first.exit_code, world_size, first)
    return Outcome(0, world_size)


def _preempted(agent: Agent, world_size: int = 0) -> Outcome | None:
    """Return the outcome of ranks that saved on a signal; None if not all did."""
    note = saved_by_all(agent.directories)
    if note is None:
        return None
    report_saved(note)
    return Outcome(note.exit_code, world_size)


def _ended_ranks(agent: Agent) -> list[int]:
    """Ranks of this machine that had ended without an error before another one failed."""
    noted = {local for local, rank in enumerate(agent.ranks) if has_ended(rank.pid, agent.directories[local])}
    return sorted(map(agent.global_rank, noted | agent.succeeded))


def _rendezvous_message(job: ElasticJob, place: str, started: bool, error: Exception) -> str:
    # Errors of C++ have a stack trace after the first line.
    reason = str(error).split("\n", 1)[0]
    if started and isinstance(job.num_machines, MachineRange):
        return (
            f"the run cannot continue, and the processes of this machine were ended: {reason}. Run the same command "
            "again to continue from the newest state."
        )
    if started:
        return (
            f"the connection to the rendezvous at {place} was lost, so the processes of this machine "
            f"were ended: {reason}"
        )
    machines = str(job.num_machines).replace(":", " to ")
    return (
        f"the {machines} machines did not meet at {place}: {reason}. Check that the launcher runs on every machine "
        "with the same --main_process_ip and --main_process_port, and that this machine can reach that port."
    )


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence the log of the rendezvous and of the agent: the launcher reports failures itself."""
    levels = {}
    for name in {*logging.root.manager.loggerDict, *_LOGS}:
        if name.startswith(_LOGS):
            logger = logging.getLogger(name)
            levels[logger] = logger.level
            logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
