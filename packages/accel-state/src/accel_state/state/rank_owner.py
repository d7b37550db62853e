"""Which process has the rank that the launcher's variables name: the workers that it starts inherit the variables.

A worker of a process pool that created a PartialState would join the group a second time with the same rank, and hang.
The process that joins the group therefore notes itself in a variable, which its workers inherit too.
"""

from __future__ import annotations

import os

from ..env import export, read_str, unset
from ..environments.base import Environment

OWNER_VARIABLE = "ACCEL_RANK_OWNER"
"""Process id, rank, world size and address of the process that has joined the group."""


def own_rank(environment: Environment) -> None:
    """Note that this process has the rank."""
    export(**{OWNER_VARIABLE: f"{os.getpid()} {_identity(environment)}"})


def release_rank() -> None:
    """Forget it: processes that are started now may join a group of their own."""
    unset(OWNER_VARIABLE)


def owner_of_rank(environment: Environment) -> int | None:
    """Return the process id of the process that has this rank, if that is not this one; None without such a process."""
    pid, _, identity = (read_str(OWNER_VARIABLE) or "").partition(" ")
    if not pid.isdigit() or int(pid) == os.getpid() or identity != _identity(environment):
        return None
    return int(pid)


def _identity(environment: Environment) -> str:
    place = f"{environment.main_address}:{environment.main_port}"
    return f"{environment.name} {environment.rank} {environment.world_size} {place}"
