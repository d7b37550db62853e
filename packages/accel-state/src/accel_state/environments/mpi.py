"""The process managers of MPI: Open MPI, MVAPICH2, and Hydra of Intel MPI and MPICH."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..processes import identity
from .base import Environment, Variables
from .slurm import in_step


@dataclass(frozen=True)
class OpenMpiEnvironment(Environment):
    """Open MPI's mpirun: OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}."""

    name = "openmpi"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        return cls.from_mpi(variables, "OMPI_COMM_WORLD", job_variable="PMIX_NAMESPACE")


@dataclass(frozen=True)
class MvapichEnvironment(Environment):
    """MVAPICH2's mpirun_rsh: MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}."""

    name = "mvapich"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        return cls.from_mpi(variables, "MV2_COMM_WORLD", job_variable="MPIRUN_ID")


@dataclass(frozen=True)
class HydraEnvironment(Environment):
    """Hydra, and launchers with its protocol (Cray PALS).

    PMI_RANK, PMI_SIZE, and MPI_LOCALRANKID, MPI_LOCALNRANKS (Cray: PMI_LOCAL_RANK, PMI_LOCAL_SIZE).
    """

    name = "hydra"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class. ``srun --mpi=pmi2`` sets PMI_RANK too, without a local rank: that is SLURM's process."""
        rank = variables.integer("PMI_RANK")
        if rank is None:
            return None
        world_size = variables.required("PMI_SIZE", because="PMI_RANK", minimum=1)
        local_rank = variables.first("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
        local_size = variables.first("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
        if local_rank is None or local_size is None:
            if in_step(variables):
                return None
            raise ConfigurationError(
                f"PMI_RANK={rank} and PMI_SIZE={world_size} are set, but MPI_LOCALRANKID and MPI_LOCALNRANKS are not, "
                "so the local rank is unknown. Set both, or unset PMI_RANK if no MPI launcher started this process."
            )
        local = variables.required(local_rank, because="PMI_RANK")
        count = variables.required(local_size, because="PMI_RANK", minimum=1)
        return cls.from_counts(variables, rank, world_size, local, count, job=_proxy() if count == world_size else None)


def _proxy() -> str | None:
    """Identity of the proxy that started the ranks of this node, as hydra sets no job id."""
    import psutil

    for ancestor in psutil.Process().parents():
        # The process may have exited, or may not be readable.
        with contextlib.suppress(psutil.Error):
            if ancestor.name().startswith("hydra_pmi_proxy"):
                return identity(ancestor.pid)
    return None
