"""The mpirun that is installed: which family it is of, and how each is told hosts, counts and variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from accel_state.registry import Registry

_VERSION_SECONDS = 30


@dataclass(frozen=True)
class MpiJob:
    """What mpirun is to start.

    Attributes:
        hostfile: path of the list of machines.
        processes: on all machines.
        local_processes: on each.
        threads: of each process.
        environment: variables for every process.
    """

    hostfile: str
    processes: int
    local_processes: int
    threads: int
    environment: Mapping[str, str]


class Mpi(ABC):
    """A family of MPI launchers.

    Attributes:
        program: what it is called.
        sign: found in what ``mpirun --version`` prints.
    """

    program = "mpirun"
    sign: re.Pattern[str]

    @abstractmethod
    def words(self, job: MpiJob) -> list[str]:
        """The command, up to the program that each process runs."""

    def variables(self, job: MpiJob) -> dict[str, str]:
        """Variables of its own that every process needs."""
        return {}


class OpenMpi(Mpi):
    """Open MPI. It forwards no variable to other machines unless it is named."""

    sign = re.compile(r"Open MPI|OpenRTE|PRRTE")

    def words(self, job: MpiJob) -> list[str]:
        """See the base class."""
        root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        # A file of bare addresses counts one slot for each; how many run where is given here. Bound to a core, threads
        # would share it.
        places = [
            "--hostfile",
            job.hostfile,
            "--map-by",
            f"ppr:{job.local_processes}:node",
            "--oversubscribe",
            "--bind-to",
            "none",
        ]
        return [self.program, *root, "-np", str(job.processes), *places, *_each("-x", job.environment)]


class Hydra(Mpi):
    """Hydra, of MPICH and of MVAPICH's mpirun."""

    sign = re.compile(r"HYDRA", re.IGNORECASE)

    def words(self, job: MpiJob) -> list[str]:
        """See the base class."""
        pairs = [word for name, value in job.environment.items() for word in ("-genv", name, value)]
        return [self.program, "-f", job.hostfile, "-n", str(job.processes), "-ppn", str(job.local_processes), *pairs]


class IntelMpi(Hydra):
    """Intel MPI: Hydra, which also gives each process cores of its own."""

    sign = re.compile(r"Intel\(R\) MPI")

    def variables(self, job: MpiJob) -> dict[str, str]:
        """Each process is bound to as many cores as it has threads; oneCCL goes over libfabric."""
        return {"I_MPI_PIN_DOMAIN": "omp", "CCL_ATL_TRANSPORT": "ofi"}


class Mvapich(Mpi):
    """MVAPICH's mpirun_rsh, which takes variables as words before the program."""

    program = "mpirun_rsh"
    sign = re.compile(r"mvapich|mpirun_rsh", re.IGNORECASE)

    def words(self, job: MpiJob) -> list[str]:
        """See the base class."""
        # Its own binding would put all threads of a process on one core.
        pairs = [f"{name}={value}" for name, value in {**job.environment, "MV2_ENABLE_AFFINITY": "0"}.items()]
        return [
            self.program,
            "-np",
            str(job.processes),
            "-ppn",
            str(job.local_processes),
            "-hostfile",
            job.hostfile,
            *pairs,
        ]


MPIS: Registry[type[Mpi]] = Registry(
    "MPI",
    {
        "intel": "accel_launch.mpi:IntelMpi",
        "openmpi": "accel_launch.mpi:OpenMpi",
        "hydra": "accel_launch.mpi:Hydra",
        "mvapich": "accel_launch.mpi:Mvapich",
    },
)


def find_mpi(environ: Mapping[str, str]) -> Mpi | None:
    """The MPI on the PATH, by what its launcher says of itself; None where there is none that is known."""
    for program in ("mpirun", "mpiexec", Mvapich.program):
        path = shutil.which(program, path=environ.get("PATH"))
        if path is not None and (mpi := _of_version(_version(path, environ))) is not None:
            return mpi
    return None


def _of_version(text: str) -> Mpi | None:
    # Intel's Hydra names itself both ways: the registry has it first.
    return next((kind() for name in MPIS if (kind := MPIS.load(name)).sign.search(text)), None)


def _version(path: str, environ: Mapping[str, str]) -> str:
    for flag in ("--version", "-v"):
        try:
            done = subprocess.run(
                [path, flag], capture_output=True, text=True, timeout=_VERSION_SECONDS, env=dict(environ), check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return done.stdout + done.stderr
    return ""


def _each(flag: str, environment: Mapping[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in (flag, f"{name}={value}")]
