"""The known launchers, and which of them started this process.

The order of detection is the order of nesting, innermost first: torchrun may run under mpirun or srun, and mpirun may
run under srun, whose variables are still there in the processes that mpirun starts.

1. torchrun (RANK and WORLD_SIZE), also DeepSpeed's launcher, ``accel launch`` and variables set by hand
2. openmpi (OMPI_COMM_WORLD_RANK)
3. mvapich (MV2_COMM_WORLD_RANK)
4. hydra: Intel MPI, MPICH, Cray PALS (PMI_RANK)
5. slurm (SLURM_PROCID inside a step of srun)
6. single: none of them
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..registry import Registry
from .base import Environment, Variables

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    {
        "torchrun": "accel_state.environments.torchrun:TorchrunEnvironment",
        "openmpi": "accel_state.environments.openmpi:OpenMpiEnvironment",
        "mvapich": "accel_state.environments.mvapich:MvapichEnvironment",
        "hydra": "accel_state.environments.hydra:HydraEnvironment",
        "slurm": "accel_state.environments.slurm:SlurmEnvironment",
        "single": "accel_state.environments.single:SingleEnvironment",
    },
)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """This process's place in the run.

    Args:
        environ: variables to read instead of the process's own.

    Raises:
        ConfigurationError: variables of the launcher are missing, not integers, or contradict each other.
    """
    variables = Variables(os.environ if environ is None else environ)
    found = (ENVIRONMENTS.load(name).read(variables) for name in ENVIRONMENTS)
    return next(environment for environment in found if environment is not None)
