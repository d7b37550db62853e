"""mpirun starts the ranks, on the machines of a hostfile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.ports import get_free_port, reserved_port

from ..cpus import usable_cores
from ..elastic.worker import RELAY_VARIABLE
from ..external_launcher import run_relayed
from ..hostfile import read_hostfile
from ..interpreter import python_command
from ..launch_mode import Kind
from ..mpi import Hydra, Mpi, MpiJob, find_mpi
from ..plan import Plan
from .base import Launcher, Start
from .rank import DEFAULT_PORT

# Those that ranks on other machines cannot do without, beside what the plan says.
_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME")
_FORWARDED_PREFIXES = ("GLOO_", "NCCL_", "TORCH_", "CCL_", "FI_", "I_MPI_", "UCX_")


class MpirunLauncher(Launcher):
    """Runs mpirun of Open MPI, Intel MPI, MPICH or MVAPICH, whichever is installed."""

    def accepts(self, plan: Plan) -> bool:
        """A hostfile for mpirun is given, and this process is not yet one that mpirun started."""
        return plan.kind is Kind.MPIRUN

    def run(self, plan: Plan) -> int:
        """Run mpirun and wait for it."""
        mpi = find_mpi(plan.full_environment())
        if mpi is None:
            raise ConfigurationError(
                f"{plan.settings.where('mpirun_hostfile')} asks for mpirun, and no mpirun of Open MPI, Intel MPI, "
                "MPICH or MVAPICH is "
                "on PATH. "
                "Install one (apt install openmpi-bin), load its module, or leave the hostfile out."
            )
        with reserved_port() as port:
            start = _start(plan, mpi, port)
            return run_relayed(start.command, {**plan.full_environment(), **start.environment})

    def starts(self, plan: Plan) -> Sequence[Start]:
        """The one call of mpirun."""
        mpi = find_mpi(plan.full_environment())
        start = _start(plan, mpi or Hydra(), get_free_port())
        if mpi is None:
            note = "no mpirun is on PATH: the command is that of Intel MPI and MPICH; other families take other words"
            return [Start(start.machine, start.command, start.environment, start.ranks, [*start.notes, note])]
        return [start]


def _start(plan: Plan, mpi: Mpi, free_port: int) -> Start:
    path = plan.settings["mpirun_hostfile"]
    hosts = read_hostfile(path, plan.settings.where("mpirun_hostfile"))
    inherited = plan.full_environment()
    address = plan.rendezvous.main_process_ip or (
        "127.0.0.1" if len(hosts) == 1 and hosts[0].is_here else hosts[0].name
    )
    own = {
        "MASTER_ADDR": address,
        "MASTER_PORT": _port(plan, hosts[0].is_here, free_port),
        **_threads(plan),
        **plan.environment,
    }
    job = MpiJob(
        str(Path(path).expanduser()), plan.num_processes, plan.local_processes, int(own["OMP_NUM_THREADS"]), own
    )
    own = {**{name: value for name, value in mpi.variables(job).items() if name not in inherited}, **own}
    forwarded = {
        name: value for name, value in inherited.items() if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    }
    relay = {RELAY_VARIABLE: "1"}
    job = MpiJob(job.hostfile, job.processes, job.local_processes, job.threads, {**forwarded, **own, **relay})
    target = plan.target
    rank = python_command("-m", "accel_launch.launchers.rank", target.kind, target.name, *target.args)
    names = ", ".join(host.name for host in hosts)
    return Start(
        f"the machines of {path} ({names}), by one call of mpirun from here",
        [*mpi.words(job), *rank],
        own,
        notes=[f"{plan.local_processes} process(es) on each machine, {plan.num_processes} in all"],
    )


def _port(plan: Plan, rank_0_is_here: bool, free_port: int) -> str:
    if plan.rendezvous.main_process_port:
        return str(plan.rendezvous.main_process_port)
    # Two jobs on one host must not meet; what is free on another host cannot be known from here.
    return str(free_port if rank_0_is_here else DEFAULT_PORT)


def _threads(plan: Plan) -> dict[str, str]:
    """Variables of OpenMP. Those of Intel's runtime bind the threads of a process to neighbouring cores, and have them
    sleep at once.
    """
    given = plan.full_environment()
    threads = str(max(1, usable_cores() // plan.local_processes))
    variables = {"OMP_NUM_THREADS": threads, "KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return {name: given.get(name) or value for name, value in variables.items()}
