"""Several processes, supervised by an agent on each machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from accel_state.env import patch_environment, read_str
from accel_state.errors import ConfigurationError, require
from accel_state.options.rendezvous import RendezvousOptions
from accel_state.options.resources import MachineRange
from accel_state.ports import DEFAULT_PORT, LOOPBACK

from ..elastic.checks import check_rendezvous
from ..entrypoint import python_command, worker_command
from ..launch_context import is_explicit
from ..launch_plan import LaunchPlan
from ..network.agreement import facts_of_plan
from ..network.error_reports import report_to_peers
from ..supervisor import GRACE_SECONDS
from .base import Launcher, MachineCommand, launch_argv


class ElasticLauncher(Launcher):
    """Starts this machine's processes, and waits until the last one has ended."""

    def run(self, plan: LaunchPlan) -> int:
        try:
            check_rendezvous(plan.rendezvous, plan.num_machines)
        except ConfigurationError as error:
            report_to_peers(plan.settings, error)
            raise
        # When the store of another machine is gone, this launcher reports it; torch would log C++ frames before.
        level = read_str("TORCH_CPP_LOG_LEVEL") or ("WARNING" if plan.debug else "ERROR")
        with patch_environment(TORCH_CPP_LOG_LEVEL=level):
            require("torch", purpose="starting more than one process", install="torch")
            from ..elastic.meeting import ElasticJob
            from ..elastic.report import announce, signal_name
            from ..elastic.run import run_job

        command = worker_command(plan.entrypoint, os.getpid())
        job = ElasticJob(
            entrypoint=command[0],
            args=command[1:],
            local_processes=plan.local_processes,
            num_machines=plan.num_machines,
            rendezvous=plan.rendezvous,
            debug=plan.debug,
            facts=facts_of_plan(plan) if plan.num_machines > 1 else {},
            line_prefix=plan.settings["log_line_prefix_template"],
            run_id=plan.settings["rdzv_id"],
            tee=plan.rendezvous.tee,
            redirects=plan.settings["redirects"] or "0",
            local_ranks_filter=plan.settings["local_ranks_filter"],
            grace_seconds=plan.settings["shutdown_timeout"] or GRACE_SECONDS,
            serves=plan.rendezvous.machine_rank == 0 if is_explicit(plan.settings, "machine_rank") else None,
        )
        # The agent starts processes with the variables of its own process.
        with patch_environment(**plan.environment):
            outcome = run_job(job)
        if outcome.failure is not None:
            announce(outcome.failure, outcome.world_size)
        elif outcome.signal and not plan.quiet:
            print(f"accel launch: ended by {signal_name(outcome.signal)}", file=sys.stderr)
        return outcome.exit_code

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the ranks of every machine; each machine has a launcher of its own."""
        command = plan.entrypoint.command(python_command())
        machines, most = [], "up to " if isinstance(plan.num_machines, MachineRange) else ""
        for machine in range(plan.num_machines):
            here = plan.num_machines == 1 or machine == plan.rendezvous.machine_rank
            name = "this machine"
            if plan.num_machines > 1:
                name = f"machine {machine} of {most}{int(plan.num_machines)}{', this one' if here else ''}"
            ranks = [_variables(plan, machine, local) for local in range(plan.local_processes)]
            machines.append(MachineCommand(name, command, plan.environment, ranks, _notes(plan, machine, here)))
        return machines


def _variables(plan: LaunchPlan, machine: int, local: int) -> dict[str, str]:
    """Return the variables that the agent sets for a rank, as far as they are known before the rendezvous."""
    options = plan.rendezvous
    variables = {
        "RANK": str(machine * plan.local_processes + local),
        "WORLD_SIZE": str(plan.num_processes),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.local_processes),
        "GROUP_RANK": str(machine),
        "GROUP_WORLD_SIZE": str(int(plan.num_machines)),
        "ROLE_NAME": options.role,
    }
    if options.rdzv_backend == "static":
        alone = plan.num_machines == 1
        variables["MASTER_ADDR"] = LOOPBACK if alone else options.main_process_ip or LOOPBACK
        if alone and options.main_process_port:
            variables["MASTER_PORT"] = str(options.main_process_port)
    return variables


def _notes(plan: LaunchPlan, machine: int, here: bool) -> list[str]:
    options, notes = plan.rendezvous, []
    if plan.num_machines == 1 and not options.main_process_port:
        notes.append("MASTER_ADDR and MASTER_PORT: this machine, and a port that is free when the processes start")
    ranged = isinstance(plan.num_machines, MachineRange)
    if isinstance(plan.num_machines, MachineRange):
        notes.append(
            f"begins with {plan.num_machines.minimum} of them; ranks and world size follow from the machines that take "
            "part, and the processes are restarted when one joins or leaves"
        )
    if not here:
        assigned = options.rdzv_backend == "static" and plan.context.process is None and not ranged
        rank = {"machine_rank": machine} if assigned else {}
        command = shlex.join(["accel", *launch_argv(plan, without=("machine_rank",), **rank)])
        notes.append(f"started there by: {command}")
    if options.max_restarts:
        notes.append(f"if a process fails, all are restarted, up to {options.max_restarts} times")
    if plan.num_machines > 1:
        notes.append(_meeting_note(options, ranged))
    return notes


def _meeting_note(options: RendezvousOptions, ranged: bool) -> str:
    """Return how the launchers of several machines meet, and watch each other."""
    address = f"{options.main_process_ip}:{options.main_process_port or DEFAULT_PORT}"
    ranks = "compare their settings" if options.rdzv_backend == "static" and not ranged else "are given their ranks"
    lost = f"after {options.machine_timeout:g} s" if options.machine_timeout else "never"
    return (
        f"the launchers meet at {address} and {ranks}; MASTER_PORT is a port that is free then; a machine without a "
        f"heartbeat is declared lost {lost} (machine_timeout)"
    )
