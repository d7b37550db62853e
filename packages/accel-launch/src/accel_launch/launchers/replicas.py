"""Supervises fault-tolerant replicas wherever they run: restarts those that die, and kills those that hang.

:mod:`.ft` starts replicas as processes of this machine, :mod:`.ray_ft` as actors of a Ray cluster. Torch-free.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from accel_state.options import FaultToleranceOptions

from ..elastic.report import shell_exit_code, signal_name
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..supervisor import SignalWatch

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
class Replica(ABC):
    """One replica, over all its restarts."""

    number: int
    restarts: int = 0
    failures: int = 0  # in a row, without a step between them
    kills: list[float] = field(default_factory=list)  # when it was killed from outside, without a step between them
    hung: bool = False  # whether the launcher has killed it because it made no progress
    # Its last report: "joins" or "waits" (for the others, before and after its first step), "computes" or "finished";
    # empty before the first.
    state: str = ""
    silent: float = 0.0  # seconds since its last report, or its start
    stopped: float = 0.0  # seconds for which the system has not run it (SIGSTOP)
    seen: int = 0  # when it reported last, in any unit
    done: bool = False

    @property
    @abstractmethod
    def runs(self) -> bool:
        """True if it has processes, of which some may have ended."""

    @property
    def is_starting(self) -> bool:
        """True if it will run: it waits for a place."""
        return False

    @abstractmethod
    def codes(self) -> Sequence[int | None]:
        """Return the exit code of each process, -N after signal N; None while it runs."""

    @abstractmethod
    def report(self) -> tuple[str, int]:
        """Return the text of its last report, empty if there is none, and when it came, in any unit."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return True if the system does not run one of its processes (SIGSTOP)."""

    @abstractmethod
    def kill_processes(self) -> None:
        """Kill what runs; how it ends is seen later."""

    @abstractmethod
    def discard(self) -> None:
        """End what is left of its processes, and forget them."""

    def is_current(self, moment: float) -> bool:
        """Return True if :meth:`report` is what the replica says after this moment of the monotonic clock."""
        return True

    def read(self) -> None:
        """Read the last report."""
        text, moment = self.report()
        self.state = text.partition(" ")[0]
        if moment != self.seen:
            self.silent, self.seen = 0.0, moment

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
        codes = self.codes()
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
class Supervision(ABC):
    """The replicas of a run that one launcher supervises."""

    plan: LaunchPlan
    options: FaultToleranceOptions
    token: str
    replicas: list[Replica] = field(default_factory=list)
    lighthouse: Lighthouse | None = None
    watch: SignalWatch = field(default_factory=SignalWatch)
    late_failure: int = 0  # how a replica ended after others had finished the run
    _finished: float | None = None  # since when it is known that a replica is at the end of the run

    @abstractmethod
    def start(self, replica: Replica) -> None:
        """Start the processes of a replica, or begin to."""

    def failed(self, text: str, code: int) -> None:
        """Report to the other machines that the run has failed."""
        self.say(text)

    def say(self, text: str) -> None:
        """Print a note."""
        if not self.plan.quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)

    def look(self, seconds: float) -> int | None:
        """Restart what has died; the exit code of the run once it has ended."""
        ended = None if self.lighthouse is None else self.lighthouse.restart_if_ended()
        if ended is not None:
            self.say(f"the lighthouse ended ({ending(ended)}); starting it again")
        for replica in self.replicas:
            if not replica.runs:
                continue
            self._watch(replica, seconds)
            code = replica.exit_code()
            if code is not None:
                failure = self._ended(replica, code)
                if failure:
                    self.failed(failure, shell_exit_code(code))
                    return shell_exit_code(code)
        if self._finished is not None:
            self._discard_starting(self._finished)
        goes_on = any(replica.runs or replica.is_starting for replica in self.replicas)
        return None if goes_on else shell_exit_code(self.late_failure)

    def _ended(self, replica: Replica, code: int) -> str:
        """Take note of the end of a replica's process; why the run has failed, or empty."""
        replica.discard()
        if code == 0:
            replica.done = True
            self.note_finished()
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

    def note_finished(self) -> None:
        """Note that a replica, here or on another machine, is at the end of the run."""
        if self._finished is None:
            self._finished = time.monotonic()

    def _discard_starting(self, moment: float) -> None:
        """End the replicas that are only starting: they would begin a run of their own, since the others have ended.

        The last steps may have taken less time than there is between two reports, so what counts is what a replica says
        after the moment at which another one was found at the end.
        """
        for other in self.replicas:
            if other.done or not other.is_current(moment):
                continue
            if other.runs:
                other.read()
            if other.state not in ("waits", "computes", "finished"):
                other.discard()

    def until_next_look(self) -> float:
        """Return the seconds until :meth:`look` should be called again.

        Fewer if a replica is about to count as hung.
        """
        limit = self.options.replica_timeout
        left = [limit - each.stopped for each in self.replicas if each.runs and each.stopped]
        left += [limit - each.silent for each in self.replicas if each.runs and each.state == "computes"]
        return min([_LOOK_SECONDS, *(seconds + _AFTER_LIMIT for seconds in left if seconds >= 0)])

    def _watch(self, replica: Replica, seconds: float) -> None:
        """Kill a replica that hangs while others wait for it."""
        seconds = min(seconds, _LONGEST_LOOK)
        replica.silent += seconds
        replica.read()
        if replica.state == "finished" and not replica.done:
            replica.done = True
            self.note_finished()
        replica.stopped = replica.stopped + seconds if replica.is_stopped() else 0.0
        limit = self.options.replica_timeout
        # While no replica waits for it, it may compute for a long time: an evaluation, for example.
        others = [other for other in self.replicas if other is not replica and other.runs]
        missed = any(other.waited(limit) for other in others)
        lags = replica.state == "computes" and replica.silent > limit and missed
        hangs = replica.stopped > limit or lags or (not replica.state and replica.silent > _START_LIMIT + limit)
        if hangs and not replica.hung:
            self.say(f"replica {replica.number} makes no progress; killing it")
            replica.hung = True
            replica.kill_processes()

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


def ending(code: int) -> str:
    """Return how a process ended, in words."""
    return signal_name(-code) if code < 0 else f"exit code {code}"
