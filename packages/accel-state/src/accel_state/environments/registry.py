"""The known launchers, and the one that started this process.

They are detected in the order of nesting, innermost first: torchrun can run under mpirun or srun, and mpirun under
srun, and processes inherit the variables of the outer launchers.

1. ray_train (NODE_RANK and RANK in a process of Ray), whose variables are otherwise those of torchrun
2. torchrun (RANK and WORLD_SIZE), also DeepSpeed's launcher, ``accel launch`` and variables set by the user
3. openmpi (OMPI_COMM_WORLD_RANK)
4. mvapich (MV2_COMM_WORLD_RANK)
5. hydra: Intel MPI, MPICH, Cray PALS (PMI_RANK)
6. slurm (SLURM_PROCID inside a step of srun)
7. single: none of them
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..registry import Registry
from .base import Environment, Variables

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    {
        "ray_train": "accel_state.environments.ray_train:RayTrainEnvironment",
        "torchrun": "accel_state.environments.torchrun:TorchrunEnvironment",
        "openmpi": "accel_state.environments.openmpi:OpenMpiEnvironment",
        "mvapich": "accel_state.environments.mvapich:MvapichEnvironment",
        "hydra": "accel_state.environments.hydra:HydraEnvironment",
        "slurm": "accel_state.environments.slurm:SlurmEnvironment",
        "single": "accel_state.environments.single:SingleEnvironment",
    },
)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process.

    Args:
        environ: the variables; by default those of this process.

    Raises:
        ConfigurationError: variables of the launcher are missing, not integers, or contradict each other.
    """
    variables = Variables(os.environ if environ is None else environ)
    candidates = (ENVIRONMENTS.load(name).read(variables) for name in ENVIRONMENTS)
    return next(environment for environment in candidates if environment is not None)
