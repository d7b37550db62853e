"""An API server of Kubernetes, and pods that are processes on virtual hosts; kube_controllers.py has the controllers.

It answers what ``accel k8s submit`` asks through the official client: to create, read and delete a job and a Service,
to list pods, and to send their logs as they are written. Pods get the variables and the name that the controllers give
them, and nothing else of this process's environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from . import namespaces
from .kube_controllers import CONTROLLERS, JobController

CONTAINER = "node"
TOKEN = "a token of a service account"


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
    created: str = field(default_factory=lambda: _now())
    disrupted: bool = False
    killed: bool = False
    ended: str = ""
    former: dict[str, Any] | None = None  # how the container ended before it was started again
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

    def state(self) -> dict[str, Any]:
        """The state of the container, as the API server shows it."""
        if self.process.poll() is None:
            return {"running": {"startedAt": self.created}}
        self.ended = self.ended or _now()
        return {"terminated": {"exitCode": self.exit_code(), "finishedAt": self.ended}}

    def as_object(self) -> dict[str, Any]:
        """What the API server shows of it."""
        state = self.state()
        status = {"name": CONTAINER, "image": "i", "imageID": "i", "ready": "running" in state}
        status |= {"restartCount": self.restarts, "lastState": self.former or {}, "state": state}
        labels = {**self.labels, "batch.kubernetes.io/job-completion-index": str(self.index)}
        return {
            "metadata": {"name": self.name, "labels": labels, "creationTimestamp": self.created},
            "status": {"phase": "Running", "containerStatuses": [status]},
        }

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the container."""
        try:
            launcher = psutil.Process(self.process.pid)
            for process in [*launcher.children(recursive=True), launcher]:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            pass


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass
class Cluster:
    """The server and its controllers; a context. ``hosts`` run a pod each."""

    hosts: namespaces.Hosts
    folder: Path
    image: dict[str, str]  # variables of the image
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind and name
    pods: list[Pod] = field(default_factory=list)
    gone: list[Pod] = field(default_factory=list)  # pods that were deleted
    controller: JobController | None = None  # of the one job
    backoff: int = 6  # backoffLimit of a TrainJob's runtime; Kubernetes' default
    refuse: str = ""  # a path that answers with 503
    closed: bool = False

    def __enter__(self) -> Cluster:
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._control, daemon=True).start()
        server = {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}
        self.config = self.folder / "kubeconfig"
        self.config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "c", "cluster": server}],
                    "users": [{"name": "u", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
                }
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        for pod in [*self.pods, *self.gone]:
            pod.signal_all(signal.SIGKILL)
            pod.process.wait()
        self._server.shutdown()
        self._server.server_close()

    # -- what controllers do with pods -------------------------------------------------------------------------------

    def begin(self, plural: str, body: dict[str, Any]) -> None:
        """Start the pods of a job."""
        controller = CONTROLLERS[plural](self, body)
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
        pod.former, pod.restarts, pod.ended = pod.state(), pod.restarts + 1, ""
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
            with self._lock:
                if self.controller is not None:
                    self.controller.look()

    def evict(self, index: int) -> bool:
        """Evict a pod; whether it was killed."""
        assert self.controller is not None
        pod = [one for one in self.pods if one.index == index][-1]
        pod.disrupted = True
        self.terminate([pod], self.controller.grace)
        return pod.killed

    def delete(self, key: str) -> None:
        """Delete a job in the foreground: its object exists until its pods have ended."""
        with self._lock:
            controller, self.controller = self.controller, None
        if controller is not None:
            self.terminate(self.pods, controller.grace)
        self.delete_pods()
        del self.objects[key]


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay quiet."""

    def do_POST(self) -> None:
        """Create an object."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        plural = self._parts()[-1]
        if plural not in (*CONTROLLERS, "services"):
            return self._answer(404, {"reason": "NotFound"})
        key = f"{plural}/{body['metadata']['name']}"
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"reason": "Unauthorized"})
        if key in self.cluster.objects:
            return self._answer(409, {"reason": "AlreadyExists"})
        body["metadata"]["uid"] = uuid.uuid4().hex
        self.cluster.objects[key] = body
        if plural in CONTROLLERS:
            self.cluster.begin(plural, body)
        return self._answer(201, body)

    def do_DELETE(self) -> None:
        """Delete an object."""
        key = "/".join(self._parts()[-2:])
        if key not in self.cluster.objects:
            return self._answer(404, {"reason": "NotFound"})
        threading.Thread(target=self.cluster.delete, args=(key,), daemon=True).start()
        return self._answer(200, {})

    def do_GET(self) -> None:
        """Read a job, list pods, or send a log."""
        parts, query = self._parts(), parse_qs(urlsplit(self.path).query)
        if self.cluster.refuse and self.cluster.refuse in self.path:
            return self._answer(503, {"reason": "ServiceUnavailable"})
        controller = self.cluster.controller
        if parts[-1] == "log":
            pod = next((pod for pod in self.cluster.pods if pod.name == parts[-2]), None)
            return self._answer(404, {"reason": "NotFound"}) if pod is None else self._send_log(pod)
        if parts[-1] == "pods":
            label, _, name = query["labelSelector"][0].partition("=")
            pods = [pod.as_object() for pod in self.cluster.pods if pod.labels.get(label) == name]
            return self._answer(200, {"kind": "PodList", "items": pods})
        if parts[-1] in ("jobs", "jobsets"):  # this cluster says that it has no TrainJobs when it is asked
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"reason": "Unauthorized"})
            return self._answer(200, {"kind": "List", "items": []})
        found = self.cluster.objects.get("/".join(parts[-2:]))
        if found is None:
            return self._answer(404, {"reason": "NotFound"})
        conditions = [] if controller is None else controller.conditions
        return self._answer(200, {**found, "status": {"conditions": conditions}})

    def _parts(self) -> list[str]:
        return urlsplit(self.path).path.split("/")

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, pod: Pod) -> None:
        """Lines with their time, in a chunk each as they are written, until the pod has ended."""
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        number, process = 0, pod.process
        with pod.log.open("rb") as log:
            while True:
                is_last = process.poll() is not None
                while line := log.readline():
                    number += 1
                    data = f"2026-01-01T00:00:{pod.restarts:02d}.{number:09d}Z ".encode() + line
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                if is_last:
                    self.wfile.write(b"0\r\n\r\n")
                    return
                time.sleep(0.05)


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
