"""Fault-tolerant replicas: each is a process of its own, and only those that die are restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import DEFAULT_PORT, LOOPBACK
from accel_state.torchft_version import torchft_version

from ..elastic.causes import interruption
from ..elastic.checks import check_rendezvous
from ..elastic.report import signal_name
from ..entrypoint import worker_command
from ..interpreter import python_command
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..network.agreement import facts_of_plan
from ..network.board import SHUTDOWN_SECONDS
from ..network.peers import timeout_seconds
from ..network.records import KILLED, Cause, State
from ..network.replica_machines import ReplicaMachines
from ..replica_plan import numbers_here, numbers_of, rank_variables, variables, visible_devices
from ..scratch import scratch_directory
from ..supervisor import GRACE_SECONDS, Child, Interrupted, SignalWatch, stop
from .base import Launcher, MachineCommand
from .replica_reports import ForeignReports
from .replicas import Replica, Supervision

_OUTPUT_OPTIONS = ("tee", "redirects", "log_dir", "local_ranks_filter")


@dataclass
class LocalReplica(Replica):
    """A replica on this machine."""

    progress: Path = Path()  # the file in which it reports its steps
    processes: list[Child] = field(default_factory=list)  # by rank; empty while it does not run

    @property
    def runs(self) -> bool:
        return bool(self.processes)

    def codes(self) -> Sequence[int | None]:
        return [process.poll() for process in self.processes]

    def report(self) -> tuple[str, int]:
        try:
            moment = self.progress.stat().st_mtime_ns
            return self.progress.read_text(encoding="utf-8"), moment
        except OSError:
            return "", 0

    def is_stopped(self) -> bool:
        return any(map(_is_stopped, self.processes))

    def kill_processes(self) -> None:
        stop(self.processes, signal.SIGKILL)

    def discard(self) -> None:
        stop(self.processes, signal.SIGKILL)
        self.processes.clear()


@dataclass
class _Run(Supervision):
    """The processes of a run on this machine."""

    directory: Path = Path()
    machines: ReplicaMachines | None = None  # None on a single one
    elsewhere: ForeignReports = field(default_factory=ForeignReports)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes()]

    def _processes(self) -> Iterator[Child]:
        for replica in self.replicas:
            assert isinstance(replica, LocalReplica)
            yield from replica.processes

    def grace_seconds(self, number: int) -> float:
        return 0.0

    def shutdown_seconds(self) -> float:
        return 0.0 if self.machines is None else SHUTDOWN_SECONDS

    def start(self, replica: Replica) -> None:
        assert self.lighthouse is not None and isinstance(replica, LocalReplica)
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

    def look(self, seconds: float) -> int | None:
        lost = None if self.machines is None else self.machines.look()
        if lost is not None:
            self.say(lost.text)
            self.say("the replicas of this machine are ended.")
            return lost.code
        if self.machines is not None:
            running = [replica for replica in self.replicas if replica.runs and replica.state]
            self.machines.share({f"replica_{replica.number}": replica.report()[0] for replica in running})
            self.elsewhere.show(self.directory, self.machines.elsewhere())
            if self.machines.has_finished():
                self.note_finished()
        return super().look(seconds)

    def failed(self, text: str, code: int) -> None:
        super().failed(text, code)
        self.post(State.FAILED, Cause(KILLED, text, code))

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
        torchft_version("--ft")
        visible_devices(plan, numbers[0])  # before anything is started, an error if there are too few
        token = run_token.make_token() if plan.num_machines == 1 else run_token.read_token().decode()
        with scratch_directory() as directory, SignalWatch() as watch:
            run = _Run(plan, options, token, directory=directory)
            watch.supervised, run.watch = run, watch
            try:
                with watch.interruptible():
                    run.machines = _machines(plan, run) if plan.num_machines > 1 else None
                    run.lighthouse = _lighthouse(run)
                with watch.starting():
                    for number in numbers:
                        replica = LocalReplica(number, progress=directory / f"replica_{number}")
                        run.replicas.append(replica)
                        run.start(replica)
                code = run.supervise()
                run.post(State.ENDED if code else State.SUCCEEDED)
                return code
            except Interrupted as error:
                run.post(State.FAILED, interruption(error.number, plan.rendezvous.machine_rank, 0))
                run.say(f"ended by {signal_name(error.number)}")
                return 128 + error.number
            finally:
                run.stop(GRACE_SECONDS if watch.received else 1.0)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the replicas, with variables of which some are known only when they start."""
        options = plan.settings.group(FaultToleranceOptions)
        command = plan.entrypoint.command(python_command("-u"))
        replicas = [
            {"ACCELERATE_FT_REPLICA": str(number), **ranks, **devices}
            for number in numbers_here(plan)
            for ranks, devices in zip(rank_variables(options), visible_devices(plan, number), strict=True)
        ]
        notes = [
            "TORCHFT_LIGHTHOUSE: torchft's lighthouse, which this command starts on a port that is free then",
            f"a secret, in {run_token.VARIABLE}, which this command makes on a single machine",
            "a replica that ends before the run does is restarted, while the others continue",
        ]
        return [MachineCommand("this machine", command, plan.environment, replicas, notes)]


def _machines(plan: LaunchPlan, run: _Run) -> ReplicaMachines:
    """Return what the launchers of several machines know of each other."""
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


def _is_stopped(process: Child) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False
