"""Fault-tolerant replicas: each is a process of its own, and only those that die are restarted."""

from __future__ import annotations

from collections.abc import Sequence

from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_state.ports import DEFAULT_PORT, LOOPBACK
from accel_state.torchft_version import torchft_version

from ..elastic.checks import check_rendezvous
from ..elastic.report import interruption, signal_name
from ..entrypoint import python_command
from ..launch_ends import reported_ends
from ..launch_plan import LaunchPlan
from ..lighthouse import Lighthouse
from ..network.agreement import facts_of_plan
from ..network.peers import timeout_seconds
from ..network.records import State
from ..network.replica_machines import ReplicaMachines
from ..replica_plan import numbers_here, numbers_of, rank_variables, visible_devices
from ..scratch import scratch_directory
from ..supervisor import GRACE_SECONDS, Interrupted, SignalWatch
from .base import Launcher, MachineCommand
from .replicas import Replica, Supervision

_OUTPUT_OPTIONS = ("tee", "redirects", "log_dir", "local_ranks_filter")


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
        with scratch_directory() as directory, SignalWatch() as watch, reported_ends(plan):
            run = Supervision(plan, options, token, directory)
            watch.supervised, run.watch = run, watch
            try:
                with watch.interruptible():
                    run.machines = _machines(plan, run) if plan.num_machines > 1 else None
                    run.lighthouse = _lighthouse(run)
                with watch.starting():
                    for number in numbers:
                        replica = Replica(number, progress=directory / f"replica_{number}")
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


def _machines(plan: LaunchPlan, run: Supervision) -> ReplicaMachines:
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


def _lighthouse(run: Supervision) -> Lighthouse:
    rendezvous, machines = run.plan.rendezvous, run.machines
    serves, host = rendezvous.machine_rank == 0, rendezvous.main_process_ip or LOOPBACK
    return Lighthouse(run.options, run.token, run.plan.debug, run.say, host, machines, serves)
