"""One rank of a job whose ranks somebody else starts: the process becomes the script.

Two ways lead here: ``srun accel launch script.py`` with several tasks on a node (``mpirun -n 4 accel launch
script.py``), and the command that :mod:`accel_launch.launchers.mpirun` gives to mpirun: ``python -m
accel_launch.launchers.rank script script.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_state.environments.base import Environment
from accel_state.errors import ConfigurationError

from ..elastic.report import shell_exit_code, signal_name
from ..elastic.worker import RELAY_VARIABLE, write_line
from ..entrypoint import Target
from ..interpreter import python_command
from ..launch_mode import Kind
from ..plan import Plan
from .base import Launcher, Start
from .single import become

WORKER = Path(__file__).parent.parent / "elastic" / "worker.py"
DEFAULT_PORT = 29500


class RankLauncher(Launcher):
    """Becomes the script, with the variables of torchrun made from those of whoever started this process."""

    def accepts(self, plan: Plan) -> bool:
        """This process is one of the ranks."""
        return plan.kind is Kind.RANK

    def run(self, plan: Plan) -> int:
        """Become the script."""
        start = self.starts(plan)[0]
        return become(worker_command(plan.target), {**plan.full_environment(), **start.ranks[0]})

    def starts(self, plan: Plan) -> Sequence[Start]:
        """This rank alone: what the others become depends on what their starter told them."""
        rank = plan.place.rank
        assert rank is not None
        variables = torchrun_variables(rank, plan.rendezvous.main_process_ip, plan.rendezvous.main_process_port)
        machine = f"this process, rank {rank.rank} of {rank.world_size} of {rank.name}"
        return [Start(machine, plan.target.command(python_command("-u")), plan.environment, [variables])]


def worker_command(target: Target, parent: int | None = None) -> list[str]:
    """The command that runs a target as a rank, which ends when its parent (the one of this process) does."""
    return [*python_command(), str(WORKER), target.kind, str(parent or os.getppid()), target.name, *target.args]


def torchrun_variables(rank: Environment, address: str | None, port: int | None) -> dict[str, str]:
    """The variables of torchrun for a rank that another program has started.

    Args:
        rank: its place.
        address: of rank 0, where that program does not tell one.
        port: on that host, where it does not tell one.

    Raises:
        ConfigurationError: nobody tells the address.
    """
    host = rank.main_address or address
    if host is None:
        raise ConfigurationError(
            f"{rank.name} started {rank.world_size} ranks on {rank.num_nodes} nodes and tells none of them where rank "
            "0 is. Give its "
            "address "
            "with --main_process_ip, or in MASTER_ADDR (mpirun: -x MASTER_ADDR=..., or -genv MASTER_ADDR ...)."
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


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the target that is named by its kind, its name and its arguments.

    Raises:
        ConfigurationError: mpirun did not start this process, or its variables contradict each other.
    """
    from accel_state.environments.registry import detect

    kind, name, *args = words
    found = detect({key: value for key, value in environ.items() if key not in ("RANK", "LOCAL_RANK")})
    if found.name == "single":
        raise ConfigurationError(
            f"no MPI launcher has started {name}: neither OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK nor PMI_RANK is "
            "set."
        )
    variables = torchrun_variables(found, environ.get("MASTER_ADDR"), None)
    return supervise(Target(kind, name, tuple(args)), {**environ, **variables})


def supervise(target: Target, environment: Mapping[str, str]) -> int:
    """Run a rank in a child, so that somebody is left to tell which rank it was when a signal ends it.

    Returns:
        The exit code, 128 + N where signal N ended it.
    """
    if sys.platform == "win32":
        return become(worker_command(target), environment)
    launcher = os.getpid()
    child = subprocess.Popen(worker_command(target, launcher), env=dict(environment))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    if code < 0 and environment.get(RELAY_VARIABLE):
        write_line(_ended_by_signal(environment, child.pid, -code))
    return shell_exit_code(code)


def _ended_by_signal(environment: Mapping[str, str], pid: int, number: int) -> dict[str, object]:
    places = {name.lower(): int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**places, "pid": pid, "exit_code": 128 + number, "signal": signal_name(number), "traceback": ""}


if __name__ == "__main__":
    from ..cli import fail

    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except ConfigurationError as problem:
        sys.exit(fail("accel launch", str(problem)))
