"""mpirun starts the ranks on the machines of a hostfile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from accel_state import rank_ends
from accel_state.errors import ConfigurationError
from accel_state.ports import DEFAULT_PORT, get_free_port, reserved_port

from ..cpus import usable_cores
from ..elastic.worker import RELAY_VARIABLE
from ..entrypoint import python_command
from ..external_launcher import run_external
from ..hostfile import Host, read_hostfile
from ..launch_ends import reported_ends
from ..launch_plan import LaunchPlan
from ..mpi import Hydra, Mpi, find_mpi
from .base import Launcher, MachineCommand

# Variables of this process that ranks on other machines need.
_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", rank_ends.VARIABLE)
_FORWARDED_PREFIXES = ("GLOO_", "NCCL_", "TORCH_", "CCL_", "FI_", "I_MPI_", "UCX_")


def forwarded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that its ranks on other machines get."""
    return {
        name: value for name, value in environ.items() if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    }


class MpirunLauncher(Launcher):
    """Runs mpirun of Open MPI, Intel MPI, MPICH or MVAPICH, whichever is installed."""

    def run(self, plan: LaunchPlan) -> int:
        hosts = _hosts(plan)
        mpi = find_mpi(plan.full_environment())
        if mpi is None:
            raise ConfigurationError(
                f"{plan.settings.where('mpirun_hostfile')} needs mpirun, but no mpirun of Open MPI, Intel MPI, MPICH "
                "or MVAPICH is on PATH. Install one (apt install openmpi-bin), load its module, or leave the hostfile "
                "out."
            )
        with reserved_port() as port, reported_ends(plan):
            start = _command(plan, mpi, port, hosts)
            return run_external(start.command, {**plan.full_environment(), **start.environment})

    def commands(self, plan: LaunchPlan) -> Sequence[MachineCommand]:
        """Return the call of mpirun."""
        exists = Path(plan.settings["mpirun_hostfile"]).expanduser().exists()
        hosts = _hosts(plan) if exists else ()
        mpi = find_mpi(plan.full_environment())
        start = _command(plan, mpi or Hydra(), get_free_port(), hosts)
        if mpi is None:
            note = "no mpirun is on PATH: the command is that of Intel MPI and MPICH; other families differ"
            start = replace(start, notes=[*start.notes, note])
        return [start]


def _hosts(plan: LaunchPlan) -> tuple[Host, ...]:
    return read_hostfile(plan.settings["mpirun_hostfile"], plan.settings.where("mpirun_hostfile"))


def _command(plan: LaunchPlan, mpi: Mpi, free_port: int, hosts: Sequence[Host]) -> MachineCommand:
    """Return the call of mpirun; ``hosts`` is empty if the hostfile does not exist yet."""
    path = plan.settings["mpirun_hostfile"]
    inherited = plan.full_environment()
    first = hosts[0] if hosts else Host("localhost")
    is_local = first.is_here
    address = "127.0.0.1" if len(hosts) <= 1 and is_local else first.name
    # A free port keeps two jobs on one host apart; free ports of another host are not known here.
    port = plan.rendezvous.main_process_port or (free_port if is_local else DEFAULT_PORT)
    environment = {
        **{name: value for name, value in mpi.variables.items() if name not in inherited},
        "MASTER_ADDR": plan.rendezvous.main_process_ip or address,
        "MASTER_PORT": str(port),
        **_thread_variables(plan),
        **plan.environment,
    }
    forwarded = {**forwarded_variables(inherited), **environment, RELAY_VARIABLE: "1"}
    mpirun = mpi.command(str(Path(path).expanduser()), plan.num_processes, plan.local_processes, forwarded)
    notes = [f"{plan.local_processes} process(es) on each machine, {plan.num_processes} in total"]
    if not hosts:
        notes.append(f"{path} does not exist yet: the first machine it lists becomes MASTER_ADDR")
    names = ", ".join(host.name for host in hosts)
    entrypoint = plan.entrypoint
    module = "accel_launch.launchers.rank"
    rank = python_command("-m", module, entrypoint.kind, entrypoint.name, *entrypoint.args)
    return MachineCommand(
        f"the machines of {path}{f' ({names})' if hosts else ''}, by one call of mpirun",
        [*mpirun, *rank],
        environment,
        notes=notes,
    )


def _thread_variables(plan: LaunchPlan) -> dict[str, str]:
    """OpenMP's variables; those of Intel's runtime bind threads to neighbouring cores, and idle ones sleep at once."""
    given = plan.full_environment()
    threads = str(max(1, usable_cores() // plan.local_processes))
    variables = {"OMP_NUM_THREADS": threads, "KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return {name: given.get(name) or value for name, value in variables.items()}
