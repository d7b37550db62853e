"""A batch script of SLURM, or the shell of salloc: srun starts one launcher on each node of the allocation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from accel_state import run_token
from accel_state.errors import ConfigurationError

from ..entrypoint import python_command
from ..external_launcher import run_external
from ..launch_context import TASKS_VARIABLE
from ..launch_ends import reported_ends
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand, launch_argv


class SrunLauncher(Launcher):
    """Runs this command on every node with srun; SLURM tells each launcher its rank and the main address."""

    def run(self, plan: LaunchPlan) -> int:
        if shutil.which("srun") is None:
            raise ConfigurationError(
                "srun is not on PATH. It starts the launchers on the nodes of this SLURM job: add SLURM's bin "
                "directory to PATH."
            )
        start = self.commands(plan)[0]
        with reported_ends(plan):
            environment = {**plan.full_environment(), **start.environment}
            # The launchers on the nodes are one run; srun passes its variables on.
            environment.setdefault(run_token.VARIABLE, run_token.make_token())
            return run_external(start.command, environment)

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the call of srun."""
        nodes = plan.num_processes // plan.local_processes
        machine = f"every node of the SLURM job ({', '.join(plan.context.hosts[:nodes])}), by one call of srun"
        notes = [
            f"each launcher starts {plan.local_processes} process(es) on its node, {plan.num_processes} in total; "
            "SLURM sets its rank"
        ]
        # No binding: the launcher distributes the cores of its node; SLURM would bind one task to one core.
        options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        command = ["srun", *options, *python_command("-m", "accel_launch", *launch_argv(plan))]
        tasks = plan.context.tasks_per_node
        return [MachineCommand(machine, command, {TASKS_VARIABLE: str(tasks)} if tasks else {}, notes=notes)]
