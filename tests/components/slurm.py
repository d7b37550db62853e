"""A SLURM controller and the daemons of two nodes, all on this machine, with a munge daemon of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from accel_state.ports import reserved_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc")
CONFIGURATION = """\
ClusterName=accel
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
MessageTimeout=90
TCPTimeout=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def find(program: str) -> str | None:
    """The path of a program; daemons are in the sbin next to a bin, which users seldom have on their PATH."""
    folders = os.environ["PATH"].split(os.pathsep)
    system = [str(Path(folder).with_name("sbin")) for folder in folders if Path(folder).name == "bin"]
    return shutil.which(program, path=os.pathsep.join([*folders, *system]))


def missing() -> str:
    """Why SLURM cannot run here; empty where it can."""
    absent = [program for program in PROGRAMS if find(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: scripts/components slurm"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root"


class Slurm:
    """A running cluster of the nodes n1 and n2; a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname().split(".")[0]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = contextlib.ExitStack()

    @property
    def env(self) -> dict[str, str]:
        """What a client's environment needs."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        ports = [self._ports.enter_context(reserved_port()) for _ in range(3)]
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, host=self.host, ports=ports))
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *self._munge_files())
            self._wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i")
            for node in ("n1", "n2"):
                self._start("slurmd", "-D", "-N", node)
            self._wait_for(lambda: self._idle_nodes() == 2, "two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        self._ports.close()
        for process in reversed(self._processes):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _munge_files(self) -> list[str]:
        names = {
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        return [f"--{option}={self.folder / name}" for option, name in names.items()]

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}.out").open("ab") as log:
            command = [str(find(program)), *words]
            self._processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **self.env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )

    def _idle_nodes(self) -> int:
        words = ["sinfo", "-h", "-N", "-o", "%N %t"]
        output = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=90, check=False
        ).stdout
        return sum(line.split()[1:] == ["idle"] for line in output.splitlines())

    def _wait_for(self, condition: object, what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{file.name}: {file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(f"SLURM: {what} did not come up within {seconds} s\n{logs}")
            time.sleep(0.1)
