"""SLURM's srun."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigurationError
from .base import Environment, Variables, main_endpoint
from .slurm_hosts import expand_hosts, find_address

# SLURM reserves step ids from here on: the shell of salloc, the batch script, the external step.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class SlurmEnvironment(Environment):
    """SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and SLURM_STEP_* inside a step of srun.

    A batch script and the shell of salloc, which have some of these variables too, are not ranks.
    The main address is MASTER_ADDR, or 127.0.0.1 on a single node, or the first host of the step.
    """

    name = "slurm"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        if not in_step(variables):
            return None
        step = "SLURM_STEP_NUM_TASKS"
        rank, local_rank, node_rank = (
            variables.required(f"SLURM_{name}", because=step) for name in ("PROCID", "LOCALID", "NODEID")
        )
        world_size = variables.required(step, because="SLURM_PROCID", minimum=1)
        nodes = variables.required("SLURM_STEP_NUM_NODES", because=step, minimum=1)
        local_world_size = _local_world_size(variables, node_rank, nodes)
        job = f"{variables.text('SLURM_JOB_ID')}.{variables.text('SLURM_STEP_ID')}"
        address, port = main_endpoint(variables, one_node=nodes == 1, job=job)
        hosts = variables.text("SLURM_STEP_NODELIST")
        if address is None and hosts is not None:
            address = find_address(expand_hosts(hosts)[0])
        return cls(rank, world_size, local_rank, local_world_size, node_rank, nodes, address, port)


@dataclass(frozen=True)
class Allocation:
    """The nodes of a SLURM job, as seen by one of its processes: a batch script, a shell of salloc, or a task.

    Attributes:
        job: the job id.
        hosts: the nodes, in SLURM's order.
        tasks_per_node: requested tasks per node; None if nodes differ, or no number was requested.
        on_node: whether this process runs on a node of the job (a shell of salloc usually runs on the login node).
        in_step: whether this process is a task of srun.
    """

    job: str
    hosts: tuple[str, ...]
    tasks_per_node: int | None
    on_node: bool
    in_step: bool

    @classmethod
    def read(cls, variables: Variables) -> Allocation | None:
        """The allocation of this process; None outside SLURM."""
        job, hosts = variables.text("SLURM_JOB_ID"), variables.text("SLURM_JOB_NODELIST")
        if job is None or hosts is None:
            return None
        on_node = "SLURMD_NODENAME" in variables
        return cls(job, expand_hosts(hosts), _even_tasks(variables), on_node, in_step(variables))


def _even_tasks(variables: Variables) -> int | None:
    """Tasks per node, if a number was requested: SLURM_TASKS_PER_NODE is set in any case."""
    asked = variables.first("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", variables.text("SLURM_TASKS_PER_NODE") or "")
    return int(match[1]) if asked and match else None


def in_step(variables: Variables) -> bool:
    """Whether srun started this process as a task of a step."""
    if "SLURM_STEP_NUM_TASKS" not in variables or "SLURM_PROCID" not in variables:
        return False
    step = variables.integer("SLURM_STEP_ID")
    return step is None or step < _FIRST_RESERVED_STEP


def _local_world_size(variables: Variables, node_rank: int, nodes: int) -> int:
    """Number of tasks on a node, from SLURM_STEP_TASKS_PER_NODE: ``"2(x3),1"`` means 2, 2, 2, 1."""
    text = variables.text("SLURM_STEP_TASKS_PER_NODE")
    counts: list[int] = []
    for part in (text or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as '2(x3),1'. srun sets it: do not change it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes or node_rank >= nodes:
        raise ConfigurationError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} lists {len(counts)} nodes, but SLURM_STEP_NUM_NODES={nodes} and "
            f"SLURM_NODEID={node_rank}."
        )
    return counts[node_rank]
