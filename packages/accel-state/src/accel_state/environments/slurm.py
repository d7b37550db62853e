"""SLURM's srun, and its notation for lists of hosts."""

from __future__ import annotations

import functools
import itertools
import math
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass

from ..errors import ConfigurationError
from .base import Environment, Variables, main_endpoint

_SCONTROL_SECONDS = 20
# SLURM itself has at most 65,533 nodes.
_MAX_NODES = 1 << 16

# A host expression: the text between commas outside brackets.
_EXPRESSION = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a list of hosts, like ``scontrol show hostnames``: gpu07, gpu08, gpu09, gpu12, big1."""
    expressions = _EXPRESSION.findall(text)
    if not expressions or ",".join(expressions) != text:
        raise _malformed(text)
    hosts: list[str] = []
    for expression in expressions:
        hosts += _expand(expression, text)
        _check_number(len(hosts), text)
    return tuple(hosts)


@functools.cache
def find_address(node: str) -> str:
    """Return the address of a node: its name if that can be resolved, else SLURM's NodeAddr, else its name."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return _ask_slurm(node) or node
    return node


def _ask_slurm(node: str) -> str | None:
    program = shutil.which("scontrol")
    if program is None:
        return None
    command = [program, "show", "node", "--oneliner", node]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bNodeAddr=(\S+)", output)
    return match[1] if match else None


def _expand(expression: str, text: str) -> list[str]:
    parts = [
        _numbers(numbers, text) if numbers or not literal else [literal]
        for numbers, literal in _PARTS.findall(expression)
    ]
    _check_number(math.prod(map(len, parts)), text)
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    """``07-09,12`` means 07, 08, 09, 12: leading zeros are kept."""
    numbers: list[str] = []
    for entry in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", entry)
        if match is None:
            raise _malformed(text)
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _malformed(text)
        _check_number(len(numbers) + int(last) + 1 - int(first), text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _check_number(nodes: int, text: str) -> None:
    if nodes > _MAX_NODES:
        raise ConfigurationError(
            f"{_shortened(text)} lists more than the {_MAX_NODES} nodes that SLURM can have. Do not change SLURM's "
            "variables."
        )


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}..."


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{_shortened(text)} is not a SLURM host list such as 'gpu[07-09,12],big1'. Do not change SLURM's variables."
    )


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
    """The nodes of a SLURM job, as seen by one of its processes: a batch script, a shell of salloc, or a task."""

    job: str  # the job id
    hosts: tuple[str, ...]  # the nodes, in SLURM's order
    tasks_per_node: int | None  # requested tasks per node; None if nodes differ, or no number was requested
    on_node: bool  # whether this process runs on a node of the job (a shell of salloc usually runs on the login node)
    in_step: bool  # whether this process is a task of srun

    @classmethod
    def read(cls, variables: Variables) -> Allocation | None:
        """Return the allocation of this process; None outside SLURM."""
        job, hosts = variables.text("SLURM_JOB_ID"), variables.text("SLURM_JOB_NODELIST")
        if job is None or hosts is None:
            return None
        on_node = "SLURMD_NODENAME" in variables
        return cls(job, expand_hosts(hosts), _even_tasks(variables), on_node, in_step(variables))


def _even_tasks(variables: Variables) -> int | None:
    """Tasks per node, if a number was requested: SLURM_TASKS_PER_NODE is set in any case."""
    asked = variables.first("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    match = re.fullmatch(r"([0-9]{1,6})(?:\(x[0-9]+\))?", variables.text("SLURM_TASKS_PER_NODE") or "")
    return int(match[1]) if asked and match else None


def in_step(variables: Variables) -> bool:
    """Return True if srun started this process as a task of a step."""
    if "SLURM_STEP_NUM_TASKS" not in variables or "SLURM_PROCID" not in variables:
        return False
    step = variables.integer("SLURM_STEP_ID")
    return step is None or step < _FIRST_RESERVED_STEP


def _local_world_size(variables: Variables, node_rank: int, nodes: int) -> int:
    """Return the number of tasks on a node, from SLURM_STEP_TASKS_PER_NODE: ``"2(x3),1"`` means 2, 2, 2, 1."""
    text = variables.text("SLURM_STEP_TASKS_PER_NODE")
    counts: list[int] = []
    for part in (text or "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or len(counts) + int(match[2] or 1) > _MAX_NODES:
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
