"""Processes started by mpirun."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .declaration import GIVEN, MORE_THAN_ONE, OptionGroup, option

_mpirun = functools.partial(option, section="mpirun_config", prefix="mpirun_", env_prefix="ACCELERATE_MPIRUN_")


@dataclass(frozen=True)
class MpiOptions(OptionGroup):
    """mpirun of OpenMPI, Intel MPI (Hydra), MPICH or MVAPICH, depending on which is installed."""

    title = "MPI"

    hostfile: str | None = _mpirun(
        metavar="FILE",
        help="Start the processes with mpirun on the machines listed in this file, one per line.",
        question="Path of a hostfile, to start the processes with mpirun (leave it empty not to use mpirun)?",
        asked_when={"cpu": (True,), "num_machines": (MORE_THAN_ONE,)},
    )
    ccl: int | None = _mpirun(
        minimum=1,
        env="CCL_WORKER_COUNT",
        exported=True,
        help="Number of oneCCL worker threads per process.",
        question="How many oneCCL worker threads should each process have?",
        asked_when={"mpirun_hostfile": (GIVEN,)},
        suggested=1,
    )
