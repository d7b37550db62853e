"""Where this launcher runs: alone, on a node of a job, as one of the ranks, or in a batch script of a cluster.

srun and mpirun describe their ranks in environment variables, Kubernetes and SkyPilot the nodes on which they start
launchers. These override the configuration file, and are overridden
by the command line and by a variable that sets the option itself.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_state.environments.base import Environment, Variables
from accel_state.environments.registry import detect
from accel_state.environments.single import SingleEnvironment
from accel_state.environments.slurm import Allocation, find_address
from accel_state.errors import ConfigurationError
from accel_state.options.resolution import Resolution, Source

from .accelerators import tpu
from .hostfile import read_hostfile

# Programs that start launchers. torchrun is not listed: its variables are inherited by everything a rank starts.
_STARTERS = ("openmpi", "mvapich", "hydra", "slurm")
TASKS_VARIABLE = "ACCEL_LAUNCH_TASKS_PER_NODE"
"""Tasks per node that a batch script asked for; set for launchers under srun, which changes SLURM_TASKS_PER_NODE."""

POD_INDEX = "JOB_COMPLETION_INDEX"
"""Set by the controller of indexed Jobs, and so in JobSets and TrainJobs."""
_SKY_NODES = "SKYPILOT_NODE_IPS"
_SKY_GPUS = "SKYPILOT_NUM_GPUS_PER_NODE"

_EXPLICIT = (Source.COMMAND_LINE, Source.ENVIRONMENT)


class Role(enum.Enum):
    """What a launcher does."""

    ALONE = "alone"
    """Starts the processes of this machine, as its settings say."""
    NODE = "node"
    """Starts the processes of this node; every other node has a launcher too."""
    RANK = "rank"
    """Becomes the script: one launcher was started for each rank."""
    BATCH = "batch"
    """Starts one launcher on each node of the allocation."""


@dataclass(frozen=True)
class LaunchContext:
    """Where a launcher runs."""

    role: Role = Role.ALONE  # what it does
    starter: str = ""  # the program that started it (slurm, openmpi, mvapich, hydra), or empty
    process: Environment | None = None  # rank, world size and address of this process, where the starter tells them
    hosts: tuple[str, ...] = ()  # nodes of the allocation, in SLURM's order; empty elsewhere
    tasks_per_node: int | None = None  # tasks per node that SLURM was asked for, or None
    gpus_per_node: int | None = None  # GPUs per node that SkyPilot was asked for, or None


@dataclass(frozen=True)
class PodEnvironment(Environment):
    """A pod of an indexed Job, of which JobSets consist: JOB_COMPLETION_INDEX, and the pod's DNS name.

    The pods of a Job are called NAME-INDEX, in the subdomain of a headless service. No controller tells a pod how many
    there are: that is the number of machines that the launch was asked for.
    """

    name = "kubernetes"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class; None with a single pod."""
        index, pods = variables.integer(POD_INDEX), variables.integer("ACCELERATE_NUM_MACHINES", minimum=1)
        if index is None or pods is None or pods == 1:
            return None
        return cls(index, pods, 0, 1, index, pods, _first_pod(index), None)


@dataclass(frozen=True)
class SkyEnvironment(Environment):
    """A node of a SkyPilot task: SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS, one address in each line."""

    name = "skypilot"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class."""
        addresses = (variables.text(_SKY_NODES) or "").split()
        if not addresses:
            return None
        rank = variables.required("SKYPILOT_NODE_RANK", because=_SKY_NODES)
        return cls(rank, len(addresses), 0, 1, rank, len(addresses), addresses[0], None)


def _first_pod(index: int) -> str | None:
    """Return the DNS name of the pod with index 0, from that of this pod.

    None if this is not NAME-INDEX in a subdomain.
    """
    host, _, domain = socket.getfqdn(socket.gethostname()).partition(".")
    stem, _, number = host.rpartition("-")
    return f"{stem}-0.{domain}" if domain and number == str(index) else None


def detect_context(settings: Resolution, environ: Mapping[str, str]) -> LaunchContext:
    """Read this launcher's context from its environment."""
    variables = Variables(environ)
    process: Environment | None = detect(environ, among=_STARTERS)
    if isinstance(process, SingleEnvironment):
        process = _read_node(settings, environ) if POD_INDEX in environ or _SKY_NODES in environ else None
    allocation = Allocation.read(variables) if "SLURM_JOB_ID" in environ else None
    requested = variables.integer(TASKS_VARIABLE, minimum=1)
    if process is not None and process.world_size > 1:
        if process.local_world_size > 1 or process.world_size != process.num_nodes:
            if settings["num_processes"] not in (None, process.world_size):
                raise ConfigurationError(
                    f"{settings.where('num_processes')}, but {process.name} started {process.world_size} launchers, "
                    f"{process.local_world_size} on this node, each of which becomes one process. Start one launcher "
                    "on each node (srun --ntasks-per-node=1, mpirun -ppn 1), or leave num_processes out."
                )
            return LaunchContext(Role.RANK, process.name, process)
        if is_explicit(settings, "num_machines") and settings["num_machines"] != process.num_nodes:
            return LaunchContext()
        hosts = allocation.hosts if allocation else ()
        return LaunchContext(Role.NODE, process.name, process, hosts, requested, variables.integer(_SKY_GPUS))
    tasks = requested or (allocation.tasks_per_node if allocation else None)
    if process is None and allocation is not None and _spans_nodes(settings, allocation):
        return LaunchContext(Role.BATCH, "slurm", None, allocation.hosts, tasks)
    return LaunchContext(tasks_per_node=tasks, gpus_per_node=variables.integer(_SKY_GPUS))


def _read_node(settings: Resolution, environ: Mapping[str, str]) -> Environment | None:
    """Return the node of a cluster that starts launchers and tells them their rank; None if the user gave the place."""
    if _gives_place(settings):
        return None
    # The number of machines may be an option or a setting of a file; only variables describe environments.
    variables = Variables({**environ, "ACCELERATE_NUM_MACHINES": str(int(settings["num_machines"]))})
    node = PodEnvironment.read(variables) or SkyEnvironment.read(variables)
    if node is not None and node.main_address is None and not settings.is_set("main_process_ip"):
        raise ConfigurationError(
            f"this pod has index {node.rank} of {node.world_size}, but it is not called NAME-{node.rank} in the domain "
            "of a headless service, by which pods find each other. Write the Job with `accel k8s manifest`, or give "
            "--main_process_ip."
        )
    return node


def is_explicit(settings: Resolution, name: str) -> bool:
    """Return True if the command line, or a variable for this option alone, set it."""
    return settings.settings[name].source in _EXPLICIT


def _gives_place(settings: Resolution) -> bool:
    return is_explicit(settings, "machine_rank") or is_explicit(settings, "main_process_ip")


def _spans_nodes(settings: Resolution, allocation: Allocation) -> bool:
    """Return True if a batch script, or the shell of salloc, should start launchers on the nodes."""
    if _gives_place(settings):
        return False
    if is_explicit(settings, "num_machines"):
        return bool(1 < settings["num_machines"] <= len(allocation.hosts))
    return len(allocation.hosts) > 1 or not allocation.on_node


def with_node(settings: Resolution, context: LaunchContext) -> Resolution:
    """Return the settings with the number of machines, this one's rank and the main address of each node's starter."""
    node = context.process
    if context.role is not Role.NODE or node is None:
        return settings
    values = {
        "num_machines": node.num_nodes,
        "machine_rank": node.node_rank,
        "main_process_ip": node.main_address or (find_address(context.hosts[0]) if context.hosts else None),
        "main_process_port": node.main_port,
    }
    given = {name: value for name, value in values.items() if value is not None and not is_explicit(settings, name)}
    return with_values(settings, given, context.starter)


def with_values(settings: Resolution, values: Mapping[str, Any], origin: str) -> Resolution:
    """Return the settings, with values that something else has decided."""
    updated = []
    for name, value in values.items():
        where = f"{name} {value} of {origin}"
        updated.append(replace(settings.settings[name], value=value, source=Source.ENVIRONMENT, where=where))
    return settings.changed(*updated)


def count_machines(settings: Resolution, context: LaunchContext) -> int:
    """Return the machines of the run: of the hostfile, the nodes of the SLURM allocation, or ``num_machines``."""
    hostfile, machines = settings["mpirun_hostfile"], int(settings["num_machines"])
    if hostfile and context.role in (Role.ALONE, Role.BATCH):
        if not Path(hostfile).expanduser().exists():
            return machines  # the launcher that starts mpirun refuses it
        hosts = read_hostfile(hostfile, settings.where("mpirun_hostfile"))
        if machines == 1:
            return len(hosts)
        if machines > len(hosts):
            raise ConfigurationError(
                f"{settings.where('num_machines')}, but the hostfile lists {len(hosts)}: "
                f"{', '.join(host.name for host in hosts)} ({settings.where('mpirun_hostfile')}). Add the missing "
                "machines to it, or leave num_machines out."
            )
    return len(context.hosts) if context.role is Role.BATCH and machines == 1 else machines


class LaunchMode(enum.Enum):
    """A way of starting processes; the value is the name of its launcher."""

    LOCAL = "local"
    """The processes of this machine: the launcher becomes the only one, or supervises several."""
    RANK = "rank"
    SRUN = "srun"
    MPIRUN = "mpirun"
    DEEPSPEED = "deepspeed"
    TPU = "tpu"
    TPU_POD = "tpu_pod"
    SAGEMAKER = "sagemaker"

    @property
    def starts_every_machine(self) -> bool:
        """True if one command starts the processes of all machines, so that no machine needs a rank."""
        return self not in (LaunchMode.LOCAL, LaunchMode.TPU)

    @property
    def counts_devices_remotely(self) -> bool:
        """True if devices, and therefore processes, are counted on the target machines."""
        return self in (LaunchMode.TPU, LaunchMode.TPU_POD, LaunchMode.SAGEMAKER)


# The value of --deepspeed_multinode_launcher with which the agent, not DeepSpeed, starts the ranks.
STANDARD = "standard"


def choose_mode(settings: Resolution, context: LaunchContext) -> LaunchMode:
    """Choose the launcher; one that was itself started as a rank starts nothing."""
    if context.role is Role.RANK:
        return LaunchMode.RANK
    if settings["compute_environment"] == "AMAZON_SAGEMAKER":
        return LaunchMode.SAGEMAKER
    if settings["tpu"]:
        if settings["tpu_cluster"]:
            return LaunchMode.TPU_POD
        return LaunchMode.LOCAL if tpu.is_installed() else LaunchMode.TPU
    if context.role is not Role.NODE:
        starts_itself = settings["num_machines"] == 1 or settings["deepspeed_multinode_launcher"] == STANDARD
        if settings["use_deepspeed"] and (settings["deepspeed_hostfile"] or not starts_itself):
            return LaunchMode.DEEPSPEED
        if settings["mpirun_hostfile"]:
            return LaunchMode.MPIRUN
    return LaunchMode.SRUN if context.role is Role.BATCH else LaunchMode.LOCAL


def find_hosts(settings: Resolution, environ: Mapping[str, str]) -> tpu.TpuHosts | None:
    """Return what a runtime that numbers the hosts itself decides before processes start; None for all others."""
    return tpu.find_hosts(settings, environ) if settings["tpu"] else None
