"""SLURM's srun."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigurationError
from .base import Environment, Variables, main_endpoint

# Step ids from here on are SLURM's own: the shell of salloc, the batch script, the external step.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class SlurmEnvironment(Environment):
    """SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and SLURM_STEP_* inside a step of srun.

    A batch script and the shell of salloc hold some of these variables too, but are not ranks: they start the ranks.
    The main address is MASTER_ADDR; without it, 127.0.0.1 on one node and else the first host of the step.
    """

    name: ClassVar[str] = "slurm"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class."""
        if not in_step(variables):
            return None
        step = "SLURM_STEP_NUM_TASKS"
        rank, local_rank, node_rank = (variables.required(f"SLURM_{name}", because=step) for name in ("PROCID", "LOCALID", "NODEID"))
        world_size = variables.required(step, because="SLURM_PROCID", minimum=1)
        nodes = variables.required("SLURM_STEP_NUM_NODES", because=step, minimum=1)
        local_world_size = _local_world_size(variables, node_rank, nodes)
        job = f"{variables.text('SLURM_JOB_ID')}.{variables.text('SLURM_STEP_ID')}"
        address, port = main_endpoint(variables, one_node=nodes == 1, job=job)
        return cls(rank, world_size, local_rank, local_world_size, node_rank, nodes, address or _first_host(variables), port)


def in_step(variables: Variables) -> bool:
    """Whether srun started this process as a task of a step."""
    if "SLURM_STEP_NUM_TASKS" not in variables or "SLURM_PROCID" not in variables:
        return False
    step = variables.integer("SLURM_STEP_ID")
    return step is None or step < _FIRST_RESERVED_STEP


def _local_world_size(variables: Variables, node_rank: int, nodes: int) -> int:
    """Tasks on a node, of SLURM_STEP_TASKS_PER_NODE: ``"2(x3),1"`` is 2, 2, 2, 1."""
    text = variables.text("SLURM_STEP_TASKS_PER_NODE")
    counts: list[int] = []
    for part in (text or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as '2(x3),1'. srun sets it: do not change it.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes or node_rank >= nodes:
        raise ConfigurationError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} lists {len(counts)} nodes, but SLURM_STEP_NUM_NODES={nodes} and SLURM_NODEID={node_rank}."
        )
    return counts[node_rank]


def _first_host(variables: Variables) -> str | None:
    """The first host of a SLURM host list: ``"gpu[07-09,12],big1"`` begins with gpu07."""
    hosts = variables.text("SLURM_STEP_NODELIST")
    if hosts is None:
        return None
    # Everything up to the first comma that is not inside brackets, each bracket cut to its first number.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else None
