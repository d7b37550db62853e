"""A batch script of SLURM, or the shell of salloc: one launcher is started on each node of the allocation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from accel_state.errors import ConfigurationError

from ..external_launcher import run_relayed
from ..interpreter import python_command
from ..launch_context import TASKS_VARIABLE
from ..launch_mode import Kind
from ..plan import Plan
from .argv import launch_words
from .base import Launcher, Start


class SrunLauncher(Launcher):
    """Runs this very command on every node with srun; SLURM tells each of them its rank and where to meet."""

    def accepts(self, plan: Plan) -> bool:
        """The allocation has more nodes than the one this process runs on, if it runs on one of them at all."""
        return plan.kind is Kind.SRUN

    def run(self, plan: Plan) -> int:
        """Run srun and wait for it."""
        if shutil.which("srun") is None:
            raise ConfigurationError(
                "this is a SLURM job on several nodes, but srun, which starts a launcher on each, is not on PATH. Add "
                "SLURM's bin "
                "folder to it."
            )
        start = self.starts(plan)[0]
        return run_relayed(start.command, {**plan.full_environment(), **start.environment})

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The one call of srun."""
        nodes = plan.num_processes // plan.local_processes
        hosts = plan.place.hosts[:nodes]
        machine = f"every node of the SLURM job ({', '.join(hosts)}), by one call of srun from here"
        notes = [
            f"each launcher starts {plan.local_processes} process(es) on its node, {plan.num_processes} in all; SLURM "
            "tells it its rank"
        ]
        # The launcher shares out the node's cores itself: left to SLURM, one task would be bound to one of them.
        words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        tasks = {TASKS_VARIABLE: str(plan.place.tasks_per_node)} if plan.place.tasks_per_node else {}
        return [
            Start(machine, [*words, *python_command("-m", "accel_launch", *launch_words(plan))], tasks, notes=notes)
        ]
