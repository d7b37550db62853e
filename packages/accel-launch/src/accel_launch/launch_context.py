"""Where this launcher itself runs: alone, once on each node of a job, as one of the ranks, or in a batch script of a
cluster.

A launcher of launchers (srun, mpirun) has said so in the environment. Its word counts as any environment variable does:
more than the configuration file, less than a variable that names the option itself or the command line.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_state.environments.base import Environment, Variables
from accel_state.environments.registry import ENVIRONMENTS
from accel_state.environments.slurm import Allocation
from accel_state.environments.slurm_hosts import find_address
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, Source

# Who starts launchers. torchrun's variables are not among them: ranks and their launchers inherit them all the time.
_STARTERS = ("openmpi", "mvapich", "hydra", "slurm")
TASKS_VARIABLE = "ACCEL_LAUNCH_TASKS_PER_NODE"
"""Set by the launcher of a batch script for those that it starts with srun, where SLURM_TASKS_PER_NODE no longer says
what was asked.
"""

_EXPLICIT = (Source.COMMAND_LINE, Source.ENVIRONMENT)


class Role(enum.Enum):
    """What a launcher is to do."""

    ALONE = "alone"
    """Start the processes of this machine, as its settings say."""
    NODE = "node"
    """Start the processes of this node; another launcher does so on each of the others."""
    RANK = "rank"
    """Become the script: somebody started one launcher for each rank."""
    BATCH = "batch"
    """Start one launcher on each node of the allocation."""


@dataclass(frozen=True)
class Place:
    """A launcher's place.

    Attributes:
        role: what it is to do.
        starter: who says so: slurm, openmpi, mvapich, hydra, or empty.
        rank: the process's place, where a starter tells one.
        hosts: nodes of the allocation, in SLURM's order; empty elsewhere.
        tasks_per_node: tasks that were asked of SLURM for each node; None where nobody asked.
    """

    role: Role = Role.ALONE
    starter: str = ""
    rank: Environment | None = None
    hosts: tuple[str, ...] = ()
    tasks_per_node: int | None = None


def find_place(settings: Resolution, environ: Mapping[str, str]) -> Place:
    """This launcher's place.

    Raises:
        ConfigurationError: variables of the starter contradict each other, or ``num_processes`` contradicts the number
            of ranks started.
    """
    variables = Variables(environ)
    found = next((place for name in _STARTERS if (place := ENVIRONMENTS.load(name).read(variables)) is not None), None)
    allocation = Allocation.read(variables)
    tasks = variables.integer(TASKS_VARIABLE, minimum=1) or (allocation.tasks_per_node if allocation else None)
    if found is not None and found.world_size > 1:
        return _started(settings, found, allocation, variables.integer(TASKS_VARIABLE, minimum=1))
    if found is None and allocation is not None and _spans_nodes(settings, allocation):
        return Place(Role.BATCH, "slurm", None, allocation.hosts, tasks)
    return Place(tasks_per_node=tasks)


def _started(settings: Resolution, found: Environment, allocation: Allocation | None, tasks: int | None) -> Place:
    if found.local_world_size > 1 or found.world_size != found.num_nodes:
        _check_count(settings, found)
        return Place(Role.RANK, found.name, found)
    if is_explicit(settings, "num_machines") and settings["num_machines"] != found.num_nodes:
        return Place()
    return Place(Role.NODE, found.name, found, allocation.hosts if allocation else (), tasks)


def is_explicit(settings: Resolution, name: str) -> bool:
    """Whether the command line, or a variable for just this option, set it."""
    return settings.settings[name].source in _EXPLICIT


def _check_count(settings: Resolution, found: Environment) -> None:
    asked = settings["num_processes"]
    if asked is not None and asked != found.world_size:
        raise ConfigurationError(
            f"{settings.where('num_processes')}, but {found.name} has started {found.world_size} launchers, "
            f"{found.local_world_size} on "
            "this "
            "node, each of which becomes one process. Start one launcher on each node (srun --ntasks-per-node=1, "
            "mpirun -ppn 1), or leave "
            "num_processes out."
        )


def _spans_nodes(settings: Resolution, allocation: Allocation) -> bool:
    """Whether a batch script, or the shell of salloc, is to start launchers on the nodes rather than processes where it
    runs.
    """
    if any(is_explicit(settings, name) for name in ("machine_rank", "main_process_ip")):
        return False
    if is_explicit(settings, "num_machines"):
        return bool(1 < settings["num_machines"] <= len(allocation.hosts))
    return len(allocation.hosts) > 1 or not allocation.on_node


def rendezvous_of(place: Place, settings: Resolution) -> dict[str, Any]:
    """What the starter of a launcher on each node decides: the number of machines, this one's rank, and where they
    meet.
    """
    node = place.rank
    if place.role is not Role.NODE or node is None:
        return {}
    address = node.main_address or (find_address(place.hosts[0]) if place.hosts else None)
    values = {
        "num_machines": node.num_nodes,
        "machine_rank": node.node_rank,
        "main_process_ip": address,
        "main_process_port": node.main_port,
    }
    return {name: value for name, value in values.items() if value is not None and not is_explicit(settings, name)}
