"""Fault-tolerant replicas: each is a process of its own, and only those that die are restarted."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from accel_state import run_token
from accel_state.errors import ConfigurationError, MissingDependencyError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import LOOPBACK

from ..elastic.causes import interruption
from ..elastic.checks import check_rendezvous
from ..elastic.report import shell_exit_code, signal_name
from ..interpreter import python_command
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..network.agreement import facts_of_plan
from ..network.board import FAREWELL_SECONDS
from ..network.records import KILLED, Cause, State
from ..network.replica_machines import ReplicaMachines
from ..network.waiting import timeout_seconds
from ..ports import DEFAULT_PORT
from ..replica_plan import numbers_here, numbers_of, rank_variables, variables, visible_devices
from ..supervisor import GRACE_SECONDS, Child, Interrupted, SignalWatch, stop
from .base import Launcher, MachineCommand
from .rank import worker_command

_LOOK_SECONDS = 0.1
# A look comes this long after the moment from which a replica counts as dead.
_AFTER_LIMIT = 0.005
# A look that took longer, because this machine was suspended, counts as this much.
_LONGEST_LOOK = 1.0
_FAILURES_IN_A_ROW = 3
_OUTPUT_OPTIONS = ("tee", "redirects", "log_dir", "local_ranks_filter")
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
    progress: Path  # the file in which it reports its steps
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
    seen: int = 0  # the latest modification time
    done: bool = False

    def read(self) -> None:
        """Read the last report."""
        try:
            self.state = self.progress.read_text(encoding="utf-8").partition(" ")[0]
        except OSError:
            self.state = ""

    @property
    def has_computed(self) -> bool:
        """Whether the running process has taken part in a step."""
        # A step may be shorter than the time between two looks, so this is in the report.
        return self.state in ("waits", "computes")

    def exit_code(self) -> int | None:
        """How it ended: as the first of its processes that was killed, or else failed; None while all run."""
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

    def kill(self) -> None:
        """End what is left of its processes."""
        stop(self.processes, signal.SIGKILL)
        self.processes.clear()

    def waited(self, limit: float) -> bool:
        """Whether it has waited for the others for so long that one of them must hang."""
        # One that joins waits while the others compute something long together, such as an evaluation.
        return self.silent > {"joins": _JOINING * limit, "waits": limit / 2}.get(self.state, math.inf)


@dataclass
class _Run:
    """The processes of a run; what its launcher supervises."""

    plan: LaunchPlan
    options: FaultToleranceOptions
    directory: Path
    token: str
    replicas: list[Replica] = field(default_factory=list)
    lighthouse: Lighthouse | None = None
    machines: ReplicaMachines | None = None  # None on a single one
    watch: SignalWatch = field(default_factory=SignalWatch)
    late_failure: int = 0  # how a replica ended after others had finished the run

    def say(self, text: str) -> None:
        if not self.plan.quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)

    def pids(self) -> list[int]:
        return [process.pid for replica in self.replicas for process in replica.processes]

    def grace_seconds(self, number: int) -> float:
        return 0.0

    def farewell_seconds(self) -> float:
        return 0.0 if self.machines is None else FAREWELL_SECONDS

    def start(self, replica: Replica) -> None:
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
        replica.state, replica.seen, replica.hung = "", 0, False
        replica.silent = replica.stopped = 0.0

    def look(self, seconds: float) -> int | None:
        """Restart what has died; the exit code of the run once it has ended."""
        lost = None if self.machines is None else self.machines.look()
        if lost is not None:
            self.say(lost.text)
            self.say("the replicas of this machine are ended.")
            return lost.code
        ended = None if self.lighthouse is None else self.lighthouse.restart_if_ended()
        if ended is not None:
            self.say(f"the lighthouse ended ({_ending(ended)}); starting it again")
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
        return None if any(replica.processes for replica in self.replicas) else shell_exit_code(self.late_failure)

    def post(self, state: State, cause: Cause | None = None) -> None:
        """Tell the launchers of other machines how the run has ended here."""
        if self.machines is not None:
            self.machines.post(state, cause)

    def _ended(self, replica: Replica, code: int) -> str:
        """Take note of the end of a replica's process; why the run has failed, or empty."""
        replica.kill()
        if code == 0:
            self._finished(replica)
            return ""
        if self.watch.received:
            return ""
        if any(other.done for other in self.replicas):
            # It may have been the one that saves, so this is not hidden.
            self.say(f"replica {replica.number} ended ({_ending(code)}) after others had finished the run")
            self.late_failure = self.late_failure or code
            return ""
        reason = replica.count_end(code, time.monotonic())
        limit = self.plan.rendezvous.max_restarts
        if limit and replica.restarts >= limit:
            reason = f"--max_restarts is {limit}"
        if reason is not None:
            return (
                f"replica {replica.number} ended ({_ending(code)}) after {replica.restarts} restarts, and the run "
                f"ends: {reason}"
            )
        replica.restarts += 1
        self.say(f"replica {replica.number} ended ({_ending(code)}); restarting it, the others continue")
        self.start(replica)
        return ""

    def _finished(self, replica: Replica) -> None:
        """Note that a replica is at the end of the run, where the others are too.

        One that is only starting would begin a run of its own.
        """
        replica.done = True
        for other in self.replicas:
            if not (other.has_computed or other.done):
                other.kill()

    def until_next_look(self) -> float:
        """Seconds until :meth:`look` should be called again: less if a replica will have hung for too long before."""
        limit = self.options.replica_timeout
        left = [limit - each.stopped for each in self.replicas if each.processes and each.stopped]
        left += [limit - each.silent for each in self.replicas if each.processes and each.state == "computes"]
        return min([_LOOK_SECONDS, *(seconds + _AFTER_LIMIT for seconds in left if seconds >= 0)])

    def _watch(self, replica: Replica, seconds: float) -> None:
        """Kill a replica that hangs while others wait for it."""
        seconds = min(seconds, _LONGEST_LOOK)
        modified = _modified(replica.progress)
        replica.silent = 0.0 if modified != replica.seen else replica.silent + seconds
        replica.seen = modified
        replica.read()
        if replica.state == "finished" and not replica.done:
            self._finished(replica)
        replica.stopped = replica.stopped + seconds if any(map(_is_stopped, replica.processes)) else 0.0
        limit = self.options.replica_timeout
        # While no replica waits for it, it may compute for a long time: an evaluation, for example.
        others = [other for other in self.replicas if other is not replica and other.processes]
        missed = any(other.waited(limit) for other in others)
        lags = replica.state == "computes" and replica.silent > limit and missed
        if replica.stopped > limit or lags or (not replica.state and replica.silent > _START_LIMIT + limit):
            self.say(f"replica {replica.number} makes no progress; killing it")
            replica.hung = True
            stop(replica.processes, signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """End everything that is still running within some seconds."""
        processes = [process for replica in self.replicas for process in replica.processes]
        stop(processes, signal.SIGTERM, seconds)
        for process in processes:
            process.send(signal.SIGKILL)  # what they started, such as the workers of their loaders
        if self.lighthouse is not None:
            self.lighthouse.close()
        if self.machines is not None:
            self.machines.leave()


class FaultTolerantLauncher(Launcher):
    """Starts torchft's lighthouse and the replicas, and restarts those that end before the run does."""

    def run(self, plan: LaunchPlan) -> int:
        for name in _OUTPUT_OPTIONS:
            setting = plan.settings.settings[name]
            if setting.value != setting.option.default:
                raise ConfigurationError(
                    f"{setting.where}: --ft keeps no log files, and shows the output of all replicas. "
                    "Leave it out, and redirect the output."
                )
        options, numbers = plan.settings.group(FaultToleranceOptions), numbers_here(plan)
        if plan.num_machines > 1:
            check_rendezvous(plan.rendezvous, plan.num_machines)
        if find_spec("torchft") is None:
            raise MissingDependencyError("--ft needs the module torchft. Install it with: pip install 'accel[ft]'")
        visible_devices(plan, numbers[0])  # before anything is started, an error if there are too few
        token = run_token.make_token() if plan.num_machines == 1 else run_token.read_token().decode()
        directory = Path(tempfile.mkdtemp(prefix="accel_launch_"))
        run = _Run(plan, options, directory, token)
        with SignalWatch() as watch:
            watch.supervised, run.watch = run, watch
            try:
                with watch.interruptible():
                    run.machines = _machines(plan, run) if plan.num_machines > 1 else None
                    run.lighthouse = _lighthouse(run)
                with watch.starting():
                    for number in numbers:
                        replica = Replica(number, directory / f"replica_{number}")
                        run.replicas.append(replica)
                        run.start(replica)
                code = _wait(run, watch)
                run.post(State.ENDED if code else State.SUCCEEDED)
                return code
            except Interrupted as error:
                run.post(State.FAILED, interruption(error.number, plan.rendezvous.machine_rank, 0))
                run.say(f"ended by {signal_name(error.number)}")
                return 128 + error.number
            finally:
                run.stop(GRACE_SECONDS if watch.received else 1.0)
                shutil.rmtree(directory, ignore_errors=True)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """The replicas, with variables of which some are known only when they start."""
        options = plan.settings.group(FaultToleranceOptions)
        command = plan.entrypoint.command(python_command("-u"))
        replicas = [
            {"ACCELERATE_FT_REPLICA": str(number), **ranks, **devices}
            for number in numbers_here(plan)
            for ranks, devices in zip(rank_variables(options), visible_devices(plan, number), strict=True)
        ]
        notes = [
            "TORCHFT_LIGHTHOUSE: torchft's lighthouse, which this command starts on a port that is free then",
            f"{run_token.VARIABLE}: a secret, which this command makes on a single machine",
            "a replica that ends before the run does is restarted, while the others continue",
        ]
        return [MachineCommand("this machine", command, plan.environment, replicas, notes)]


def _machines(plan: LaunchPlan, run: _Run) -> ReplicaMachines:
    """What the launchers of several machines know of each other."""
    options = plan.rendezvous

    def is_short(ranks: list[int]) -> bool:
        return sum(len(numbers_of(plan, rank)) for rank in ranks) < run.options.min_replicas

    return ReplicaMachines(
        (str(options.main_process_ip), options.main_process_port or DEFAULT_PORT),
        options.machine_rank,
        plan.num_machines,
        facts=facts_of_plan(plan),
        give_up_seconds=options.machine_timeout,
        timeout_seconds=timeout_seconds(options.rdzv_conf),
        is_short=is_short,
        say=run.say,
    )


def _lighthouse(run: _Run) -> Lighthouse:
    rendezvous, machines = run.plan.rendezvous, run.machines
    serves, host = rendezvous.machine_rank == 0, rendezvous.main_process_ip or LOOPBACK
    return Lighthouse(run.options, run.token, run.plan.debug, run.say, host, machines, serves)


def _wait(run: _Run, watch: SignalWatch) -> int:
    before = time.monotonic()
    while True:
        with watch.interruptible():
            time.sleep(run.until_next_look())
        now = time.monotonic()
        code = run.look(now - before)
        before = now
        if code is not None:
            return code


def _is_stopped(process: Child) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False


def _ending(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
