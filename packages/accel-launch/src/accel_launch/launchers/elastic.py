"""Several processes, over torch's elastic agent."""

from __future__ import annotations

from pathlib import Path

from accel_state.env import patch_environment
from accel_state.errors import require

from ..elastic.checks import check_rendezvous
from ..interpreter import python_command
from ..plan import Plan
from .base import Launcher

_WORKER = Path(__file__).parent.parent / "elastic" / "worker.py"


class ElasticLauncher(Launcher):
    """Starts this machine's processes, and stays until the last one has ended."""

    def accepts(self, plan: Plan) -> bool:
        """More than one process in all."""
        return plan.num_processes > 1

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


def worker_command(plan: Plan) -> list[str]:
    """The command of every rank."""
    import os

    target = plan.target
    words = [*python_command(), str(_WORKER), target.kind, str(os.getpid()), target.name, *target.args]
    # The agent replaces $-names in the words (torchrun's ${local_rank}); what the user wrote goes through as it is.
    return [word.replace("$", "$$") for word in words]
