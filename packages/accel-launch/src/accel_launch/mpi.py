"""The installed mpirun: its family, and how each family takes hosts, counts and variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping

_VERSION_SECONDS = 30


class Mpi(ABC):
    """A family of MPI launchers.

    Attributes:
        program: name of the launcher.
        signature: matches the output of ``mpirun --version``.
        variables: variables that every process needs with this family.
    """

    program = "mpirun"
    signature: re.Pattern[str]
    variables: Mapping[str, str] = {}

    @abstractmethod
    def command(self, hostfile: str, processes: int, local_processes: int, environment: Mapping[str, str]) -> list[str]:
        """Return the command, up to the program that each process runs.

        Args:
            hostfile: path of the list of machines.
            processes: processes on all machines.
            local_processes: processes on each machine.
            environment: variables for every process.
        """


class OpenMpi(Mpi):
    """Open MPI. It forwards no variable to other machines unless it is named."""

    signature: re.Pattern[str] = re.compile(r"Open MPI|OpenRTE|PRRTE")

    def command(self, hostfile: str, processes: int, local_processes: int, environment: Mapping[str, str]) -> list[str]:
        root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        # A file of bare addresses counts one slot each, so the count per node is given here. Binding to one core would
        # make all threads of a process share it.
        mapping = ["--map-by", f"ppr:{local_processes}:node", "--oversubscribe", "--bind-to", "none"]
        variables = [word for name, value in environment.items() for word in ("-x", f"{name}={value}")]
        return [self.program, *root, "-np", str(processes), "--hostfile", hostfile, *mapping, *variables]


class Hydra(Mpi):
    """Hydra, of MPICH and of MVAPICH's mpirun."""

    signature: re.Pattern[str] = re.compile(r"HYDRA", re.IGNORECASE)

    def command(self, hostfile: str, processes: int, local_processes: int, environment: Mapping[str, str]) -> list[str]:
        variables = [word for name, value in environment.items() for word in ("-genv", name, value)]
        counts = ["-n", str(processes), "-ppn", str(local_processes)]
        return [self.program, "-f", hostfile, *counts, *variables]


class IntelMpi(Hydra):
    """Intel MPI: Hydra that binds each process to as many cores as it has threads; oneCCL runs over libfabric."""

    signature: re.Pattern[str] = re.compile(r"Intel\(R\) MPI")
    variables: Mapping[str, str] = {"I_MPI_PIN_DOMAIN": "omp", "CCL_ATL_TRANSPORT": "ofi"}


class Mvapich(Mpi):
    """MVAPICH's mpirun_rsh, which takes variables as words before the program."""

    program = "mpirun_rsh"
    signature: re.Pattern[str] = re.compile(r"mvapich|mpirun_rsh", re.IGNORECASE)

    def command(self, hostfile: str, processes: int, local_processes: int, environment: Mapping[str, str]) -> list[str]:
        # MVAPICH's own binding would put all threads of a process on one core.
        variables = [f"{name}={value}" for name, value in {**environment, "MV2_ENABLE_AFFINITY": "0"}.items()]
        counts = ["-np", str(processes), "-ppn", str(local_processes)]
        return [self.program, *counts, "-hostfile", hostfile, *variables]


# Intel MPI is also a Hydra: it comes first.
_FAMILIES: tuple[type[Mpi], ...] = (IntelMpi, OpenMpi, Hydra, Mvapich)


def find_mpi(environ: Mapping[str, str]) -> Mpi | None:
    """Return the MPI on PATH, identified by the version its launcher prints; None if there is no known one."""
    for program in ("mpirun", "mpiexec", Mvapich.program):
        path = shutil.which(program, path=environ.get("PATH"))
        version = _version(path, environ) if path else ""
        for mpi in _FAMILIES if version else ():
            if mpi.signature.search(version):
                return mpi()
    return None


def _version(path: str, environ: Mapping[str, str]) -> str:
    for flag in ("--version", "-v"):
        command = [path, flag]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_VERSION_SECONDS, env=dict(environ), check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return result.stdout + result.stderr
    return ""
