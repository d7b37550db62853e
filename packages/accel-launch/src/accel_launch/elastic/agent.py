"""Starts the ranks of this machine, restarts them together with those of other machines, and notices how they end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from accel_state.env import all_variables, patch_environment
from accel_state.errors import ConfigurationError
from accel_state.hang_files import PRINTER_VARIABLE
from accel_state.hang_files import read as read_hang_report

from ..network.board import SHUTDOWN_SECONDS, say
from ..network.interfaces import interface_variables
from ..network.peers import Peers
from ..network.records import Cause, State
from ..supervisor import GRACE_SECONDS, Child, Interrupted, SignalWatch, Supervised, stop
from .meeting import ElasticJob, Meeting, Meetings, RunEnded
from .output import Tee, line_prefix, rank_streams
from .preemption import grace_seconds, notes, report_saved, save_and_wait, saved_by_all
from .report import RankFailure, cause_of, interruption, read_failure
from .worker import die_with_launcher

logger: Final = logging.getLogger("accel_launch.agent")

# After another machine has failed: its ranks may hang in a collective, with a handler that never runs.
_HUNG_SECONDS = 10.0


class Agent(Supervised):
    """The agent of this machine.

    Args:
        job: what to start.
        meetings: how the machines meet.
        directory: where directories of the ranks are made, for their reports and their output.
        watch: signals to the launcher.
    """

    def __init__(self, job: ElasticJob, meetings: Meetings, directory: str | Path, watch: SignalWatch) -> None:
        self._job, self._directory, self._watch = job, directory, watch
        self.meetings: Meetings = meetings
        self._left = job.rendezvous.max_restarts
        self._starts = 0
        self._meeting: Meeting | None = None
        self._run_directory: Path | None = None
        self._peers: Peers | None = None
        self._tees: list[Tee] = []
        self._printed: set[str] = set()  # hang reports
        self._codes: dict[int, int] = {}  # exit codes by local rank of the ranks that were seen to fail
        self.directories: dict[int, Path] = {}
        """``RUN/attempt_N/LOCAL_RANK`` of each rank of the latest start, by local rank."""
        self.ranks: list[Child] = []
        """The processes of the latest start, by local rank."""
        self.elsewhere: Cause | None = None
        """Why another machine failed first, if one did."""
        self.ended_at: float | None = None
        """When the last rank of this machine had ended, in seconds since the epoch; None while one may run."""
        self.succeeded: set[int] = set()
        """Local ranks that had ended without an error when the processes were last checked."""
        watch.supervised = self

    # -- what a signal needs to know ---------------------------------------------------------------------------------

    def pids(self) -> Iterable[int]:
        """Process ids of the ranks of this machine."""
        return [rank.pid for rank in self.ranks]

    def grace_seconds(self, number: int) -> float:
        """Return how long ranks that save on a signal may take."""
        return max(grace_seconds(self.directories, number), self._job.grace_seconds)

    def shutdown_seconds(self) -> float:
        """Return how long other machines may take to notice that this one has ended."""
        return 0.0 if self._peers is None else self._job.rendezvous.monitor_interval + SHUTDOWN_SECONDS

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks over all machines; 0 before they have met."""
        return 0 if self._meeting is None else sum(self._meeting.sizes)

    def global_rank(self, local_rank: int) -> int:
        """Return the rank of a process of this machine in the run."""
        assert self._meeting is not None
        return sum(self._meeting.sizes[: self._meeting.rank]) + local_rank

    def run(self) -> bool:
        """Start the ranks, and wait until they have ended and no restart is left; return True if they failed.

        Raises:
            Interrupted: a signal asked the launcher to end; the ranks have ended.
        """
        try:
            return self._run()
        except Interrupted as error:
            leaves = self.meetings.may_leave(error.number)
            if self._peers is not None and (leaves or not notes(self.directories)):
                # Before the ranks end: those of other machines fail when they do.
                cause = interruption(error.number, self._meeting_rank, self.meetings.round)
                self._peers.post(State.LEFT if leaves else State.FAILED, cause)
            raise
        finally:
            if self._watch.received:
                save_and_wait(self.directories, self._watch.received)
            # Ctrl-C, and a collective with a machine that is cut off: Python's handler never runs in such a rank.
            hangs = self._peers is not None and self._watch.received == signal.SIGINT
            self._stop(self._watch.received or signal.SIGTERM, _HUNG_SECONDS if hangs else GRACE_SECONDS)
            self.ended_at = time.time()

    def _run(self) -> bool:
        self._meet()
        self._start()
        while True:
            with self._watch.interruptible():
                time.sleep(self._job.rendezvous.monitor_interval)
            failed, again = self._look()
            if failed is None:
                # Machines have joined or left, or have requested a restart.
                if self.meetings.is_awaited() and not self._ended_between_steps() and not self._restart():
                    return True
            elif again and (self._left > 0 or self.meetings.may_shrink):
                self._left -= 1
                if not self._restart():
                    return True
            else:
                self._stop()
                if not failed:
                    self._wait_for_machines()
                return failed

    def _look(self) -> tuple[bool | None, bool]:
        """Check the ranks, and whether another machine has failed.

        Returns:
            Whether the ranks failed, once they have ended, or must; None before. And whether they may be started again.
        """
        self.hang_report()
        codes = {local: code for local, rank in enumerate(self.ranks) if (code := rank.poll()) is not None}
        self.succeeded = {local for local, code in codes.items() if code == 0}
        failures = {local: code for local, code in codes.items() if code}
        peers = self._peers
        if failures:
            self._codes = failures
            for local, code in failures.items():
                logger.error("failed (exitcode: %d) local_rank: %d (pid: %d)", code, local, self.ranks[local].pid)
            self._stop()
            # Now, because ranks that save do not end at the same moment.
            if self._watch.forwarded and saved_by_all(self.directories) is not None:
                # The launcher was signalled, not a single rank: this machine is about to go away.
                self._left = 0
                return True, False
            if self._left > 0 and peers is not None and not self.meetings.may_shrink and peers.any_ended():
                self._left = 0  # a machine that has ended cannot take part in a restart
            return True, True
        if len(codes) == len(self.ranks):
            return False, False
        failure = None if peers is None else peers.failure()
        if failure is None or peers is None:
            return None, False
        self._stop(seconds=_HUNG_SECONDS)
        if self.meetings.may_shrink or (self._left > 0 and not peers.any_ended()):
            return True, True  # those that are left start again
        self._left = 0
        return True, False

    def hang_report(self) -> str:
        """Print a hang report of the ranks of this machine that was not printed; return the latest one, or ""."""
        found = [report for directory in self.directories.values() if (report := read_hang_report(directory))]
        for text, printed in found:
            if not printed and text not in self._printed:
                self._printed.add(text)
                say(text)
        return found[-1][0] if found else ""

    def _ended_between_steps(self) -> bool:
        """Let ranks that save on a signal do so, before machines meet again; whether all have ended by themselves."""
        saving = notes(self.directories)
        if not saving or not self.meetings.may_save():
            return False
        numbers = saving[0].signals
        number = signal.SIGTERM if signal.SIGTERM in numbers else numbers[0]
        save_and_wait(self.directories, number, unless=lambda: not self.meetings.may_save())
        return all(rank.poll() is not None for rank in self.ranks)

    def _restart(self) -> bool:
        """Start the ranks again; False if another machine has ended, and the failure of this one stands.

        Raises:
            RendezvousClosedError: another machine has ended, and the ranks of this one did not fail.
        """
        self._stop(seconds=_HUNG_SECONDS if self.meetings.may_shrink else None)
        peers, former = self._peers, self._own_cause()
        if peers is not None:
            peers.post(State.WAITING, former)
        try:
            self._meet()
        except RunEnded:
            raise
        except RendezvousClosedError:
            if not (self._codes or self.meetings.may_shrink):
                raise
            return False
        assert self._meeting is not None
        # Now all have told why.
        self._announce_restart(self._meeting, former if peers is None else peers.first())
        self._start()
        return True

    def _announce_restart(self, meeting: Meeting, cause: Cause | None) -> None:
        """Print why the ranks are started again."""
        saved = saved_by_all(self.directories)
        text = f"tarting all processes again (restart {meeting.restarts} of {self._job.rendezvous.max_restarts})"
        if saved is not None:
            report_saved(saved, "" if meeting.news else f"S{text}")
        elif cause is not None and meeting.is_failure:
            say(cause.text)
        if meeting.news:
            say(meeting.news)
        elif saved is None:
            say(f"a process failed or machines changed; s{text}")

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Wait for the other machines; ranks that are started again get a new store."""
        limit = self._job.rendezvous.max_restarts
        with self._watch.interruptible():
            meeting = self.meetings.meet()
        self._meeting, self._left = meeting, limit - meeting.restarts
        board, shrinks = self.meetings.board, self.meetings.may_shrink
        if board is None:
            return
        members = [int(number) for number in board.me.members] if shrinks else []
        self._peers = Peers(board, self.meetings.round, len(meeting.sizes), members)
        if self._left > 0 and not shrinks:
            board.after_loss = lambda _: "The others wait for it, or for another machine in its place."

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        count = self._job.local_processes
        if self._run_directory is None:
            self._run_directory = Path(tempfile.mkdtemp(prefix=f"{self.meetings.run_id}_", dir=self._directory))
        attempt = self._run_directory / f"attempt_{self._starts}"
        shutil.rmtree(attempt, ignore_errors=True)
        self.directories = {local: attempt / str(local) for local in range(count)}
        for directory in self.directories.values():
            directory.mkdir(parents=True)
        self._starts += 1
        self.ranks, self._tees, self._codes = [], [], {}
        try:
            with self._watch.starting(forks=self._job.forks):
                for local in range(count):
                    self._watch.check()
                    self._start_rank(local)
        except OSError as error:
            self._stop()
            file = f" ({error.filename})" if error.filename else ""
            raise ConfigurationError(
                f"the {count} processes of this machine cannot be started: {error.strerror}{file}. Those that were "
                "started were terminated. Start fewer with --num_processes, or raise the limits of this shell "
                "(ulimit -n, ulimit -u)."
            ) from None

    def _start_rank(self, local: int) -> None:
        job, variables = self._job, self._variables(local)
        if callable(job.entrypoint):
            context: Any = multiprocessing.get_context(job.start_method)
            arguments = (job.entrypoint, tuple(job.args), variables, os.getpid())
            process = context.Process(target=call_rank, args=arguments, name=f"rank {variables['RANK']}")
            # Only a fork copies the board's lock, and only this long may the other machines hear nothing.
            board = self.meetings.board if job.forks else None
            held = contextlib.nullcontext() if board is None else board.held()
            # Spawned ranks read the environment before they call the function.
            with held, patch_environment(**variables):
                process.start()
            self.ranks.append(Child(process, leads_group=False))
            return
        command, environment = [job.entrypoint, *job.args], {**all_variables(), **variables}
        streams = rank_streams(local, job.tee, job.redirects, job.local_ranks_filter)
        if streams.shown and not streams.kept:
            self.ranks.append(Child.start(command, environment))
            return
        prefix = line_prefix(job.line_prefix, variables)
        tee = Tee(self.directories[local], streams, prefix, (sys.stdout, sys.stderr))
        self._tees.append(tee)
        self.ranks.append(Child.start(command, environment, **tee.files))
        tee.start()

    def _variables(self, local: int) -> dict[str, str]:
        """Return the variables of a rank: those of torchrun."""
        assert self._meeting is not None
        job, meeting, rank = self._job, self._meeting, str(self.global_rank(local))
        size, machines, board = str(self.world_size), str(len(meeting.sizes)), self.meetings.board
        own = "" if board is None else board.own_address
        return {
            **(interface_variables(own) if own else {}),
            **{"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": str(local), "GROUP_RANK": str(meeting.rank)},
            **{"WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": machines},
            "LOCAL_WORLD_SIZE": str(job.local_processes),
            "ROLE_NAME": job.rendezvous.role,
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_RESTART_COUNT": str(meeting.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(job.rendezvous.max_restarts),
            "TORCHELASTIC_RUN_ID": self.meetings.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(self.directories[local] / "error.json"),
            PRINTER_VARIABLE: str(self.directories[local] / "error.json"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": all_variables().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _stop(self, number: int = signal.SIGTERM, seconds: float | None = None) -> None:
        """End the ranks, and copy the rest of their output."""
        stop(self.ranks, number, self._job.grace_seconds if seconds is None else seconds)
        for tee in self._tees:
            tee.close()

    def end_groups(self) -> None:
        """End what the ranks left running."""
        for rank in self.ranks:
            rank.end_group()

    # -- other machines ----------------------------------------------------------------------------------------------

    @property
    def _meeting_rank(self) -> int:
        return 0 if self._meeting is None else self._meeting.rank

    def failures(self) -> list[RankFailure]:
        """Ranks that have failed, and ranks that reported a failure before they were ended."""
        found = []
        for local, rank in enumerate(self.ranks):
            # What the launcher itself has ended is not a failure.
            code = self._codes.get(local, 0)
            failure = read_failure(self.global_rank(local), local, rank.pid, code, self.directories[local])
            if failure.exit_code:
                found.append(failure)
        return found

    def _own_cause(self) -> Cause | None:
        """Why the ranks of this machine end: because one of them failed, or because another machine is lost."""
        if self.meetings.may_shrink and saved_by_all(self.directories) is not None:
            return None
        own = cause_of(self.failures(), self._meeting_rank, self.world_size, self.meetings.round)
        return own if own is not None or self._peers is None else self._peers.loss()

    def _wait_for_machines(self) -> None:
        if self._peers is not None:
            self._peers.post(State.SUCCEEDED)
            with self._watch.interruptible():
                self.elsewhere = self._peers.wait_for_end()

    def post_failure(self) -> None:
        """Tell the other machines that the ranks of this one failed, or were ended by a signal.

        It also finds out what happened first.
        """
        peers = self._peers
        if peers is None or self.elsewhere is not None:
            return
        if self.meetings.may_leave(self._watch.received):
            return  # the others have been told
        if saved_by_all(self.directories) is not None and self.meetings.may_leave(self._watch.forwarded):
            peers.post(State.LEFT)
            return
        if notes(self.directories):
            # Ranks that save on the signal do so on the other machines too, and end by themselves.
            peers.post(State.ENDED)
            peers.settle()
            return
        if self._watch.received:
            peers.settle()
            return
        own = self._own_cause()
        peers.post(State.ENDED if own is None else State.FAILED, own)
        first = peers.settle()
        # Otherwise the rank of this machine is described, with more detail.
        if first is not None and not (first == own and self.failures()):
            self.elsewhere = first


def call_rank(function: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, str], launcher: int) -> None:
    """Run a function as a rank."""
    die_with_launcher(launcher)
    os.environ.update(variables)
    try:
        function(*args)
    except Exception:
        sys.exit(1)  # the function has reported the exception
