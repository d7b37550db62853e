"""One rank of a job whose ranks another program starts: the process becomes the script.

There are two ways to get here: ``srun accel launch script.py`` with several tasks per node (or ``mpirun -n 4 accel
launch script.py``), and the command that :mod:`accel_launch.launchers.mpirun` passes to mpirun, ``python -m
accel_launch.launchers.rank script script.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from accel_state.environments.base import Environment
from accel_state.errors import ConfigurationError
from accel_state.ports import DEFAULT_PORT

from ..elastic.report import shell_exit_code, signal_name
from ..elastic.worker import RELAY_VARIABLE, write_line
from ..entrypoint import Entrypoint, python_command, worker_command
from ..errors import fail
from ..launch_plan import LaunchPlan
from .base import Launcher, MachineCommand
from .single import become


class RankLauncher(Launcher):
    """Becomes the script, with torchrun's variables derived from those of the program that started this process."""

    def run(self, plan: LaunchPlan) -> int:
        start = self.commands(plan)[0]
        command = worker_command(plan.entrypoint, os.getppid())
        return become(command, {**plan.full_environment(), **start.ranks[0]})

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the command of this rank; other ranks depend on their own environment."""
        rank = plan.context.process
        assert rank is not None
        variables = torchrun_variables(rank, plan.rendezvous.main_process_ip, plan.rendezvous.main_process_port)
        machine = f"this process, rank {rank.rank} of {rank.world_size} of {rank.name}"
        command = plan.entrypoint.command(python_command("-u"))
        return [MachineCommand(machine, command, plan.environment, [variables])]


def torchrun_variables(rank: Environment, address: str | None, port: int | None) -> dict[str, str]:
    """Return the variables of torchrun for a rank that another program has started."""
    host = rank.main_address or address
    if host is None:
        raise ConfigurationError(
            f"{rank.name} started {rank.world_size} ranks on {rank.num_nodes} nodes without the address of rank 0. "
            "Give it with --main_process_ip, or in MASTER_ADDR (mpirun: -x MASTER_ADDR=..., or -genv MASTER_ADDR ...)."
        )
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(rank.num_nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(rank.main_port or port or DEFAULT_PORT),
    }


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run an entrypoint, given by kind, name and arguments, as the rank that mpirun started."""
    from accel_state.environments.registry import detect

    kind, name, *args = argv
    rank = detect({key: value for key, value in environ.items() if key not in ("RANK", "LOCAL_RANK")})
    if rank.name == "single":
        raise ConfigurationError(
            f"no MPI launcher has started {name}: OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK and PMI_RANK are not set."
        )
    variables = torchrun_variables(rank, environ.get("MASTER_ADDR"), None)
    return supervise(Entrypoint(kind, name, tuple(args)), {**environ, **variables})


def supervise(entrypoint: Entrypoint, environment: Mapping[str, str]) -> int:
    """Run a rank in a child process, and report to the launcher if a signal ends it.

    Returns:
        The exit code; 128 + N if signal N ended the rank.
    """
    if sys.platform == "win32":
        return become(worker_command(entrypoint, os.getppid()), environment)
    child = subprocess.Popen(worker_command(entrypoint, os.getpid()), env=dict(environment))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    if code < 0 and environment.get(RELAY_VARIABLE):
        ranks = {name.lower(): int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        failure = {"pid": child.pid, "exit_code": 128 - code, "signal": signal_name(-code), "traceback": ""}
        write_line({**ranks, **failure})
    return shell_exit_code(code)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except ConfigurationError as error:
        sys.exit(fail("accel launch", str(error)))
