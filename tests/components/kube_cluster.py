"""A Kubernetes cluster whose pods are processes on virtual hosts; kube_controllers.py has the controllers.

It runs the objects of a manifest. Pods get the variables and the name that the controllers give them, and nothing else
of this process's environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from . import namespaces
from .kube_controllers import CONTROLLERS, JobController


@dataclass
class Pod:
    """A pod of an indexed Job."""

    index: int
    name: str
    labels: dict[str, str]
    command: list[str]
    variables: dict[str, str]
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    disrupted: bool = False
    killed: bool = False
    restarts: int = 0

    @property
    def log(self) -> Path:
        """The log of the container that runs, or has ended last."""
        return self.folder / f"{self.name}.{self.restarts}.log"

    def start(self) -> None:
        """Start the container."""
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=self.variables, stdout=output, stderr=output
            )

    def exit_code(self) -> int:
        """That of the container, which has ended."""
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the container."""
        try:
            launcher = psutil.Process(self.process.pid)
            for process in [*launcher.children(recursive=True), launcher]:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            pass


@dataclass
class Cluster:
    """The controllers and the pods; a context. ``hosts`` run a pod each."""

    hosts: namespaces.Hosts
    folder: Path
    image: dict[str, str]  # variables of the image
    pods: list[Pod] = field(default_factory=list)
    gone: list[Pod] = field(default_factory=list)  # pods that were deleted
    controller: JobController | None = None  # of the one job
    backoff: int = 6  # backoffLimit of a TrainJob's runtime; Kubernetes' default
    closed: bool = False

    def __enter__(self) -> Cluster:
        threading.Thread(target=self._control, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        for pod in [*self.pods, *self.gone]:
            pod.signal_all(signal.SIGKILL)
            pod.process.wait()

    def create(self, documents: Sequence[dict[str, Any]]) -> None:
        """Create the objects of a manifest, and start the pods of its job, which is the last one."""
        *services, body = documents
        assert all(one["kind"] == "Service" for one in services)
        controller = CONTROLLERS[body["kind"]](self, body)
        controller.begin()
        self.controller = controller

    def start_pod(self, controller: JobController, index: int) -> None:
        """Make a pod of a job."""
        (container,) = controller.pod_spec["containers"]
        host = f"{controller.job}-{index}"
        accel, *rest = container["command"]
        assert accel == "accel"
        variables = {
            **self.image,
            "HOSTNAME": host,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            "KUBERNETES_SERVICE_PORT_HTTPS": "443",
            "KUBERNETES_PORT": "tcp://10.96.0.1:443",
            "JOB_COMPLETION_INDEX": str(index),
            # The only field that a variable refers to is the index.
            **{one["name"]: one.get("value", str(index)) for one in container.get("env", [])},
        }
        domain = f"{host}.{controller.subdomain}"
        # A pod finds the others of its namespace by the short name too: its resolv.conf names the domain.
        line = f"{self.hosts.addresses[index]} {domain}.ml.svc.cluster.local {domain} {host}\n"
        for place in self.hosts.names:
            # In place: the file is mounted in the namespace of each host.
            file = Path("/etc/netns") / place / "hosts"
            if line not in file.read_text():
                with file.open("a") as opened:
                    opened.write(line)
        script = f'hostname {host}; exec "$@"'
        words = ["bash", "-c", script, "bash", sys.executable, "-m", "accel_launch", *rest]
        name = f"{host}-{uuid.uuid4().hex[:5]}"
        pod = Pod(index, name, controller.labels, self.hosts.command(index, words), variables, self.folder)
        pod.start()
        self.pods.append(pod)

    def restart_container(self, pod: Pod) -> None:
        """Start the container of a pod again, as a kubelet does with the restart policy OnFailure."""
        pod.restarts += 1
        pod.start()

    def terminate(self, pods: Sequence[Pod], grace: float) -> None:
        """End containers: SIGTERM to the first process of each, SIGKILL to all after the grace period."""
        for pod in pods:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for pod in pods:
            try:
                pod.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pod.signal_all(signal.SIGKILL)
                pod.killed = True
                pod.process.wait()

    def delete_pods(self) -> None:
        """Delete the objects of pods, which have ended."""
        self.gone += self.pods
        self.pods = []

    def _control(self) -> None:
        while not self.closed:
            time.sleep(0.1)
            if self.controller is not None:
                self.controller.look()

    def evict(self, index: int) -> bool:
        """Evict a pod; whether it was killed."""
        assert self.controller is not None
        pod = [one for one in self.pods if one.index == index][-1]
        pod.disrupted = True
        self.terminate([pod], self.controller.grace)
        return pod.killed


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 200) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def image_variables() -> dict[str, str]:
    """What an image with accel and this interpreter has."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    return kept | {"OMP_NUM_THREADS": "1"}
