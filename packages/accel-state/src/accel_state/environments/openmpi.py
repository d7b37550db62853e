"""Open MPI's mpirun."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Environment, Variables


@dataclass(frozen=True)
class OpenMpiEnvironment(Environment):
    """OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}."""

    name = "openmpi"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        return cls.from_mpi(variables, "OMPI_COMM_WORLD", job_variable="PMIX_NAMESPACE")
