"""Several processes, over torch's elastic agent."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from accel_state.env import patch_environment
from accel_state.errors import require

from ..elastic.checks import DEFAULT_PORT, LOOPBACK, check_rendezvous
from ..interpreter import python_command
from ..launch_mode import Kind
from ..plan import Plan
from .argv import launch_words
from .base import Launcher, Start

_WORKER = Path(__file__).parent.parent / "elastic" / "worker.py"


class ElasticLauncher(Launcher):
    """Starts this machine's processes, and stays until the last one has ended."""

    def accepts(self, plan: Plan) -> bool:
        """More than one process in all, or one that is started again when it fails, or whose output is kept in files."""
        return plan.kind is Kind.LOCAL and plan.is_watched

    def run(self, plan: Plan) -> int:
        """Start the processes and wait for them."""
        check_rendezvous(plan.rendezvous, plan.num_machines)
        require("torch", purpose="starting more than one process", install="torch")
        from ..elastic.run import Job, report, run_job

        command = worker_command(plan)
        job = Job(
            entrypoint=command[0],
            args=command[1:],
            local_processes=plan.local_processes,
            num_machines=plan.num_machines,
            rendezvous=plan.rendezvous,
            debug=plan.debug,
        )
        # The agent starts processes with the variables of its own process.
        with patch_environment(**plan.environment):
            outcome = run_job(job)
        report(outcome)
        return outcome.exit_code

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The ranks of every machine; those of the others are started by the launcher there."""
        return [_starts_of(plan, machine) for machine in range(plan.num_machines)]


def _starts_of(plan: Plan, machine: int) -> Start:
    here = plan.num_machines == 1 or machine == plan.rendezvous.machine_rank
    name = (
        "this machine"
        if plan.num_machines == 1
        else f"machine {machine} of {plan.num_machines}{', this one' if here else ''}"
    )
    ranks = [_variables(plan, machine, local) for local in range(plan.local_processes)]
    return Start(
        name, plan.target.command(python_command()), plan.environment, ranks, tuple(_notes(plan, machine, here))
    )


def _variables(plan: Plan, machine: int, local: int) -> dict[str, str]:
    """What torch's agent gives to a rank, as far as it is known before the machines have met."""
    options = plan.rendezvous
    known = plan.num_machines > 1 or options.main_process_port
    address = {
        "MASTER_ADDR": options.main_process_ip or LOOPBACK,
        "MASTER_PORT": str(options.main_process_port or DEFAULT_PORT),
    }
    return {
        "RANK": str(machine * plan.local_processes + local),
        "WORLD_SIZE": str(plan.num_processes),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.local_processes),
        "GROUP_RANK": str(machine),
        "GROUP_WORLD_SIZE": str(plan.num_machines),
        "ROLE_NAME": options.role,
        **(address if known and options.rdzv_backend == "static" else {}),
    }


def _notes(plan: Plan, machine: int, here: bool) -> list[str]:
    options, notes = plan.rendezvous, []
    if plan.num_machines == 1 and not options.main_process_port:
        notes.append("MASTER_ADDR and MASTER_PORT: this machine, and a port that is free when the processes start")
    elif options.rdzv_backend != "static":
        notes.append(
            f"the machines meet at {options.main_process_ip}:{options.main_process_port or DEFAULT_PORT}, which "
            "decides their ranks"
        )
    if not here:
        rank = {"machine_rank": machine} if options.rdzv_backend == "static" and plan.place.rank is None else {}
        notes.append(
            "started there by: " + shlex.join(["accel", *launch_words(plan, without=("machine_rank",), **rank)])
        )
    if options.max_restarts:
        notes.append(f"all processes are started again up to {options.max_restarts} times when one of them fails")
    return notes


def worker_command(plan: Plan) -> list[str]:
    """The command of every rank."""
    import os

    target = plan.target
    words = [*python_command(), str(_WORKER), target.kind, str(os.getpid()), target.name, *target.args]
    # The agent replaces $-names in the words (torchrun's ${local_rank}); what the user wrote goes through as it is.
    return [word.replace("$", "$$") for word in words]
