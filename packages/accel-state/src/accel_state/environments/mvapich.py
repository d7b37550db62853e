"""MVAPICH2's mpirun_rsh."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Environment, Variables


@dataclass(frozen=True)
class MvapichEnvironment(Environment):
    """MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}."""

    name = "mvapich"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        return cls.from_mpi(variables, "MV2_COMM_WORLD", job_variable="MPIRUN_ID")
