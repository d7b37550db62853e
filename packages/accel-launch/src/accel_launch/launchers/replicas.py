"""The fault-tolerant replicas of this machine: restarts those that die, and kills those that hang. Torch-free."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from accel_state import run_token
from accel_state.options import FaultToleranceOptions

from ..elastic.report import shell_exit_code, signal_name
from ..entrypoint import worker_command
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..network.board import SHUTDOWN_SECONDS
from ..network.records import KILLED, Cause, State
from ..network.replica_machines import ReplicaMachines
from ..replica_plan import variables
from ..supervisor import Child, SignalWatch, Supervised, stop

_LOOK_SECONDS = 0.1
# A look comes this long after the moment from which a replica counts as dead.
_AFTER_LIMIT = 0.005
# A look that took longer, because this machine was suspended, counts as this much.
_LONGEST_LOOK = 1.0
_FAILURES_IN_A_ROW = 3
# A replica that is killed from outside so often within so many seconds, without a step in between, ends the run: the
# system, for example, kills whatever takes too much memory.
_KILLS, _KILL_SECONDS = 10, 300.0
_START_LIMIT = 300.0
_JOINING = 10

# Signals with which a program, not a user or the system, ends a process.
_CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGPIPE")
    if hasattr(signal, name)
)


@dataclass
class Replica:
    """One replica, over all its restarts."""

    number: int
    progress: Path = Path()  # the file in which it reports its steps
    processes: list[Child] = field(default_factory=list)  # by rank; empty while it does not run
    restarts: int = 0
    failures: int = 0  # in a row, without a step between them
    kills: list[float] = field(default_factory=list)  # when it was killed from outside, without a step between them
    hung: bool = False  # whether the launcher has killed it because it made no progress
    # Its last report: "joins" or "waits" (for the others, before and after its first step), "computes" or "finished";
    # empty before the first.
    state: str = ""
    silent: float = 0.0  # seconds since its last report, or its start
    stopped: float = 0.0  # seconds for which the system has not run it (SIGSTOP)
    seen: int = 0  # when it reported last: the time of the file, in nanoseconds
    done: bool = False

    def discard(self) -> None:
        """End what is left of its processes, and forget them."""
        stop(self.processes, signal.SIGKILL)
        self.processes.clear()

    def read(self) -> None:
        """Read the last report."""
        self.state = self.report().partition(" ")[0]
        try:
            moment = self.progress.stat().st_mtime_ns
        except OSError:
            moment = 0
        if moment != self.seen:
            self.silent, self.seen = 0.0, moment

    def report(self) -> str:
        """Return the text of its last report; empty if there is none."""
        with suppress(OSError):
            return self.progress.read_text(encoding="utf-8")
        return ""

    def is_stopped(self) -> bool:
        """Return True if the system does not run one of its processes (SIGSTOP)."""
        for process in self.processes:
            with suppress(psutil.Error):
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    return True
        return False

    def begin(self) -> None:
        """Forget what the former processes have reported, before others are started."""
        self.state, self.seen, self.hung = "", 0, False
        self.silent = self.stopped = 0.0

    @property
    def has_computed(self) -> bool:
        """True if the running process has taken part in a step."""
        # A step may be shorter than the time between two looks, so this is in the report.
        return self.state in ("waits", "computes")

    def exit_code(self) -> int | None:
        """Return how it ended: as the first of its processes that was killed, or else failed; None while all run."""
        codes = [process.poll() for process in self.processes]
        ended = [code for code in codes if code is not None]
        if not ended or (None in codes and not any(ended)):
            return None  # processes that have finished wait for each other
        return min(ended) if min(ended) < 0 else max(ended)

    def count_end(self, code: int, now: float) -> str | None:
        """Count an end before that of the run, and say why the run cannot continue; None if it can.

        Args:
            code: the exit code of the replica, -N after signal N.
            now: seconds of a monotonic clock.
        """
        if code < 0 and self.has_computed:
            self.failures, self.kills = 0, []
        elif code < 0 and -code not in _CRASHES and not self.hung:
            # Not an error of the script, however often it happens; but it may be killed for what it needs.
            self.kills = [*(moment for moment in self.kills if now - moment < _KILL_SECONDS), now]
            if len(self.kills) >= _KILLS:
                return f"it was killed {_KILLS} times within {_KILL_SECONDS:g} s, before it could compute a step"
        else:
            self.failures += 1
            if self.failures >= _FAILURES_IN_A_ROW:
                return f"it failed {self.failures} times in a row"
        return None

    def waited(self, limit: float) -> bool:
        """Return True if it has waited for the others for so long that one of them must hang."""
        # One that joins waits while the others compute something long together, such as an evaluation.
        return self.silent > {"joins": _JOINING * limit, "waits": limit / 2}.get(self.state, math.inf)


@dataclass
class Supervision(Supervised):
    """The replicas of a run on this machine."""

    plan: LaunchPlan
    options: FaultToleranceOptions
    token: str
    directory: Path  # where the replicas of this machine report their steps
    replicas: list[Replica] = field(default_factory=list)
    lighthouse: Lighthouse | None = None
    watch: SignalWatch = field(default_factory=SignalWatch)
    machines: ReplicaMachines | None = None  # None on a single one
    late_failure: int = 0  # how a replica ended after others had finished the run
    _finished: bool = False  # whether a replica, here or on another machine, is at the end of the run
    _elsewhere: Mapping[str, str] = field(default_factory=dict)  # reports of other machines, by file

    def pids(self) -> list[int]:
        """See :class:`Supervised`."""
        return [process.pid for process in self._processes()]

    def _processes(self) -> Iterator[Child]:
        for replica in self.replicas:
            yield from replica.processes

    def shutdown_seconds(self) -> float:
        """See :class:`Supervised`."""
        return 0.0 if self.machines is None else SHUTDOWN_SECONDS

    def start(self, replica: Replica) -> None:
        """Start the processes of a replica."""
        assert self.lighthouse is not None
        common = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse.address,
            "ACCELERATE_FT_DIRECTORY": str(self.directory),
            run_token.VARIABLE: self.token,
        }
        command = worker_command(self.plan.entrypoint, os.getpid())
        replica.progress.unlink(missing_ok=True)
        for more in variables(self.plan, replica.number, replica.restarts):
            environment = {**self.plan.full_environment(), **common, **more}
            replica.processes.append(Child.start(command, environment))
        replica.begin()

    def say(self, text: str) -> None:
        """Print a note."""
        if not self.plan.quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)

    def look(self, seconds: float) -> int | None:
        """Restart what has died; the exit code of the run once it has ended."""
        if self.machines is not None:
            lost = self._exchange(self.machines)
            if lost is not None:
                self.say(lost.text)
                self.say("the replicas of this machine are ended.")
                return lost.code
        ended = None if self.lighthouse is None else self.lighthouse.restart_if_ended()
        if ended is not None:
            self.say(f"the lighthouse ended ({ending(ended)}); starting it again")
        for replica in self.replicas:
            if not replica.processes:
                continue
            self._watch(replica, seconds)
            code = replica.exit_code()
            if code is not None:
                failure = self._ended(replica, code)
                if failure:
                    self.say(failure)
                    self.post(State.FAILED, Cause(KILLED, failure, shell_exit_code(code)))
                    return shell_exit_code(code)
        if self._finished:
            self._discard_starting()
        return None if any(replica.processes for replica in self.replicas) else shell_exit_code(self.late_failure)

    def _exchange(self, machines: ReplicaMachines) -> Cause | None:
        """Exchange reports with other machines, and return why this one must end; None if it continues.

        Reports of others become files next to those of this machine. A replica that is started again reads them, so
        that it does not begin a run of its own while others train.
        """
        lost = machines.look()
        if lost is not None:
            return lost
        running = [replica for replica in self.replicas if replica.processes and replica.state]
        machines.share({f"replica_{replica.number}": replica.report() for replica in running})
        reports = machines.elsewhere()
        for name, text in reports.items():
            if self._elsewhere.get(name) != text:
                part = self.directory / f".{name}.{os.getpid()}"
                part.write_text(text, encoding="utf-8")
                part.replace(self.directory / name)
        for name in self._elsewhere.keys() - reports.keys():
            (self.directory / name).unlink(missing_ok=True)
        self._elsewhere = dict(reports)
        self._finished = self._finished or machines.has_finished()
        return None

    def _ended(self, replica: Replica, code: int) -> str:
        """Take note of the end of a replica's process; why the run has failed, or empty."""
        replica.discard()
        if code == 0:
            replica.done = True
            self._finished = True
            return ""
        if self.watch.received:
            return ""
        if any(other.done for other in self.replicas):
            # It may have been the one that saves, so this is not hidden.
            self.say(f"replica {replica.number} ended ({ending(code)}) after others had finished the run")
            self.late_failure = self.late_failure or code
            return ""
        reason = replica.count_end(code, time.monotonic())
        limit = self.plan.rendezvous.max_restarts
        if limit and replica.restarts >= limit:
            reason = f"--max_restarts is {limit}"
        if reason is not None:
            return (
                f"replica {replica.number} ended ({ending(code)}) after {replica.restarts} restarts, and the run "
                f"ends: {reason}"
            )
        replica.restarts += 1
        self.say(f"replica {replica.number} ended ({ending(code)}); restarting it, the others continue")
        self.start(replica)
        return ""

    def _discard_starting(self) -> None:
        """End the replicas that are only starting: they would begin a run of their own, since the others have ended.

        The last steps may have taken less time than there is between two looks, so the report is read again.
        """
        for other in self.replicas:
            if other.done:
                continue
            if other.processes:
                other.read()
            if other.state not in ("waits", "computes", "finished"):
                other.discard()

    def until_next_look(self) -> float:
        """Return the seconds until :meth:`look` should be called again.

        Fewer if a replica is about to count as hung.
        """
        limit = self.options.replica_timeout
        left = [limit - each.stopped for each in self.replicas if each.processes and each.stopped]
        left += [limit - each.silent for each in self.replicas if each.processes and each.state == "computes"]
        return min([_LOOK_SECONDS, *(seconds + _AFTER_LIMIT for seconds in left if seconds >= 0)])

    def _watch(self, replica: Replica, seconds: float) -> None:
        """Kill a replica that hangs while others wait for it."""
        seconds = min(seconds, _LONGEST_LOOK)
        replica.silent += seconds
        replica.read()
        if replica.state == "finished" and not replica.done:
            replica.done = True
            self._finished = True
        replica.stopped = replica.stopped + seconds if replica.is_stopped() else 0.0
        limit = self.options.replica_timeout
        # While no replica waits for it, it may compute for a long time: an evaluation, for example.
        others = [other for other in self.replicas if other is not replica and other.processes]
        missed = any(other.waited(limit) for other in others)
        lags = replica.state == "computes" and replica.silent > limit and missed
        hangs = replica.stopped > limit or lags or (not replica.state and replica.silent > _START_LIMIT + limit)
        if hangs and not replica.hung:
            self.say(f"replica {replica.number} makes no progress; killing it")
            replica.hung = True
            stop(replica.processes, signal.SIGKILL)  # how it ends is seen at the next look

    def supervise(self) -> int:
        """Look until the run has ended; returns its exit code.

        Raises:
            Interrupted: a signal asked the launcher to end.
        """
        before = time.monotonic()
        while True:
            with self.watch.interruptible():
                time.sleep(self.until_next_look())
            now = time.monotonic()
            code = self.look(now - before)
            before = now
            if code is not None:
                return code

    def post(self, state: State, cause: Cause | None = None) -> None:
        """Tell the launchers of other machines how the run has ended here."""
        if self.machines is not None:
            self.machines.post(state, cause)

    def stop(self, seconds: float) -> None:
        """End everything that is still running within some seconds."""
        processes = list(self._processes())
        stop(processes, signal.SIGTERM, seconds)
        for process in processes:
            process.send(signal.SIGKILL)  # what they started, such as the workers of their loaders
        if self.lighthouse is not None:
            self.lighthouse.close()
        if self.machines is not None:
            self.machines.leave()


def ending(code: int) -> str:
    """Return how a process ended, in words."""
    return signal_name(-code) if code < 0 else f"exit code {code}"
