"""Processes started by mpirun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .option import GIVEN, MORE_THAN_ONE, OptionGroup, option


@dataclass(frozen=True)
class MpiOptions(OptionGroup):
    """mpirun of OpenMPI, Intel MPI (Hydra), MPICH or MVAPICH, whichever is installed."""

    title: ClassVar[str] = "MPI"

    hostfile: str | None = option(
        None,
        name="mpirun_hostfile",
        kind=str,
        env="ACCELERATE_MPIRUN_HOSTFILE",
        key="mpirun_config.mpirun_hostfile",
        metavar="FILE",
        help="Have mpirun start the processes, on the machines that this file lists, one on a line.",
        question="Path of a hostfile, to have mpirun start the processes (leave it empty not to use mpirun)?",
        asked_when={"cpu": (True,), "num_machines": (MORE_THAN_ONE,)},
    )
    ccl: int | None = option(
        None,
        name="mpirun_ccl",
        kind=int,
        minimum=1,
        env="CCL_WORKER_COUNT",
        exported=True,
        key="mpirun_config.mpirun_ccl",
        metavar="N",
        help="Worker threads of oneCCL in each process.",
        question="How many oneCCL worker threads should each process have?",
        asked_when={"mpirun_hostfile": (GIVEN,)},
        suggested=1,
    )
