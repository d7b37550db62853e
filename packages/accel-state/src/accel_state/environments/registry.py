"""The known launchers, and the one that started this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..registry import Registry
from .base import Environment, Variables
from .single import SingleEnvironment

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    {
        "ray_train": "accel_state.environments.ray_train:RayTrainEnvironment",
        "torchrun": "accel_state.environments.torchrun:TorchrunEnvironment",
        "openmpi": "accel_state.environments.mpi:OpenMpiEnvironment",
        "mvapich": "accel_state.environments.mpi:MvapichEnvironment",
        "hydra": "accel_state.environments.mpi:HydraEnvironment",
        "slurm": "accel_state.environments.slurm:SlurmEnvironment",
        "single": "accel_state.environments.single:SingleEnvironment",
    },
)

# Variables without which a launcher did not start this process, in the order of nesting, innermost first: torchrun can
# run under mpirun or srun, and mpirun under srun, and processes inherit the variables of the outer launchers.
VARIABLES: dict[str, tuple[str, ...]] = {
    "ray_train": ("RAY_JOB_ID",),  # whose other variables are those of torchrun
    "torchrun": ("RANK", "LOCAL_RANK"),  # also DeepSpeed's launcher, ``accel launch`` and variables set by the user
    "openmpi": ("OMPI_COMM_WORLD_RANK",),
    "mvapich": ("MV2_COMM_WORLD_RANK",),
    "hydra": ("PMI_RANK",),  # Intel MPI, MPICH, Cray PALS
    "slurm": ("SLURM_PROCID",),  # inside a step of srun
}


_SINGLE = SingleEnvironment()


def detect(environ: Mapping[str, str] | None = None, among: Iterable[str] = tuple(VARIABLES)) -> Environment:
    """Return the environment of this process; a :class:`SingleEnvironment` if none of the launchers started it.

    Args:
        environ: the variables; by default those of this process.
        among: names of the launchers to look for, the first of which wins.

    Raises:
        ConfigurationError: variables of the launcher are missing, not integers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    for name in among:
        if not environ.keys().isdisjoint(VARIABLES[name]):
            environment = ENVIRONMENTS.load(name).read(Variables(environ))
            if environment is not None:
                return environment
    return _SINGLE
