"""MVAPICH2's mpirun_rsh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Environment, Variables


@dataclass(frozen=True)
class MvapichEnvironment(Environment):
    """MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}."""

    name: ClassVar[str] = "mvapich"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        rank = variables.integer("MV2_COMM_WORLD_RANK")
        if rank is None:
            return None
        because = "MV2_COMM_WORLD_RANK"
        world_size = variables.required("MV2_COMM_WORLD_SIZE", because, minimum=1)
        local_rank = variables.required("MV2_COMM_WORLD_LOCAL_RANK", because)
        local_world_size = variables.required("MV2_COMM_WORLD_LOCAL_SIZE", because, minimum=1)
        return cls.from_counts(
            variables, rank, world_size, local_rank, local_world_size, job=variables.text("MPIRUN_ID")
        )
