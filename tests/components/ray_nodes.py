"""A Ray cluster of two nodes, each on a host of its own with a name and an address; see namespaces.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from . import environments, namespaces
from .digits import environment

PORT = 6379
# A node that does not answer is declared lost after about 2 s instead of 15 s, and slow starts are waited for.
_PATIENCE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_niceness": "0",  # 15 otherwise: beside other work the ranks would hardly run
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def missing() -> str:
    """Why there can be no such cluster here; empty where there can."""
    return environments.missing("ray") or namespaces.missing()


class RayNodes:
    """A running cluster; a context.

    Args:
        cpus: of each node.
        takes_jobs: whether `ray job submit` can be used on the head.
    """

    def __init__(self, cpus: int = 2, takes_jobs: bool = False) -> None:
        self.hosts, self._cpus, self._takes_jobs = namespaces.Hosts(), cpus, takes_jobs
        self.python = environments.find("ray")
        self._open = contextlib.ExitStack()

    @property
    def address(self) -> str:
        """That of the head."""
        return f"{self.hosts.addresses[0]}:{PORT}"

    def __enter__(self) -> RayNodes:
        with contextlib.ExitStack() as opened:
            # Unix sockets have short names.
            self.folder, self._other_disk = (
                Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp"))) for _ in range(2)
            )
            opened.enter_context(self.hosts)
            opened.callback(self._kill_all)
            self.start_node(0)
            self.start_node(1)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def start_node(self, host: int) -> None:
        """Start a node on a host."""
        words = [str(self.python), "-m", "ray.scripts.scripts", "start", "--num-cpus", str(self._cpus)]
        words += ["--node-ip-address", self.hosts.addresses[host], "--object-store-memory", "100000000"]
        words += ["--resources", f'{{"host{host}": 8}}', "--num-gpus", "0"]
        if host == 0:
            words += ["--head", "--port", str(PORT), "--temp-dir", str(self.folder)]
            words += ["--include-dashboard", str(self._takes_jobs).lower()]
        else:
            # Ray's directory has the same name on all nodes, and each fills and clears its own.
            mount = f'mount --bind {self._other_disk} {self.folder} && exec "$@"'
            words = ["bash", "-c", mount, "bash", *words, "--address", self.address]
        done = self.run(host, words, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")

    def kill_node(self, host: int) -> None:
        """Kill everything on a host, as a power failure does."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, host: int) -> list[int]:
        """The processes of a host."""
        name = self.hosts.names[host]
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def find(self, host: int, wanted: Callable[[str], bool]) -> list[int]:
        """The processes of a host with a wanted command line."""
        found = []
        for pid in self.pids(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                if wanted(" ".join(psutil.Process(pid).cmdline())):
                    found.append(pid)
        return found

    def environment(self, **further: str) -> dict[str, str]:
        """The variables of a command on one of the hosts."""
        return environment(**_PATIENCE, **further)

    def run(self, host: int, words: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        command, env = self.hosts.command(host, words), self.environment()
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    def launch(self, *words: str, host: int = 0, folder: Path, **further: str) -> subprocess.Popen[str]:
        """Start ``accel launch --ray`` on a host."""
        command = [str(self.python), "-m", "accel_launch", "launch", "--ray", self.address, *words]
        return subprocess.Popen(
            self.hosts.command(host, command),
            cwd=folder,
            env=self.environment(**further),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 20
        while (left := [pid for host in (0, 1) for pid in self.pids(host)]) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
