"""Sends the objects of a job to a Kubernetes cluster, and follows its pods to the exit code. Torch-free.

It uses the official client (``pip install kubernetes``) and its configuration: that of kubectl, or that of a pod.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError, require
from accel_state.preemption import PREEMPTED_EXIT_CODE

from .kubernetes_manifest import CONTAINER

_POLL_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_LOST_SECONDS = 300.0  # the cluster may be silent this long while its job is followed
_PENDING_SECONDS = 20.0  # after which it is said why a pod has not started
_LAST_LOGS_SECONDS = 15.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
# Codes of pods that end because others did, or that are started again.
_ECHOES = (PREEMPTED_EXIT_CODE, 137, 143)


@dataclass(frozen=True)
class _Kind:
    group: str
    version: str
    plural: str
    label: str  # of its pods, with the name of the object
    succeeded: str  # the condition after success


KINDS = {
    "Job": _Kind("batch", "v1", "jobs", "batch.kubernetes.io/job-name", "Complete"),
    "JobSet": _Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-name", "Completed"),
    # Kubeflow Trainer makes a JobSet with the name of the TrainJob.
    "TrainJob": _Kind("trainer.kubeflow.org", "v1alpha1", "trainjobs", "jobset.sigs.k8s.io/jobset-name", "Complete"),
}


def say(text: str) -> None:
    """Print a line about the job, not of it."""
    print(f"accel k8s: {text}", file=sys.stderr, flush=True)


class _Interrupted(BaseException):
    """A signal asked the command to end."""

    def __init__(self, number: int, _: object) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make signals that end the command raise, unless they are ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise _Interrupted(number, frame)

    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    former = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def submit(documents: Sequence[dict[str, Any]], *, context: str | None, follow: bool, cancel: bool) -> int:
    """Create a job and the service that belongs to it, and follow the job.

    Args:
        documents: the objects of a manifest.
        context: of kubectl's configuration; None for the current one.
        follow: whether to print the logs and wait for the end.
        cancel: whether SIGINT and SIGTERM delete the job; its pods get SIGTERM, and are followed to their end.

    Returns:
        The exit code of the job; 0 if it is not followed, 128 + N after signal N.

    Raises:
        ConfigurationError: no cluster is configured, it refuses an object, or the job exists already.
        MissingDependencyError: the client is not installed.
    """
    cluster = Cluster(context)
    *others, main = documents
    namespace = main["metadata"].get("namespace") or cluster.namespace
    kind, name = KINDS[main["kind"]], str(main["metadata"]["name"])
    created = cluster.create(kind, main, namespace)
    try:
        for document in others:
            # Deleted with the job.
            owner = {"apiVersion": main["apiVersion"], "kind": main["kind"], "name": name}
            owner["uid"] = created["metadata"]["uid"]
            metadata = {**document["metadata"], "ownerReferences": [owner]}
            cluster.create_service({**document, "metadata": metadata}, namespace)
    except BaseException:
        cluster.delete(kind, name, namespace)
        raise
    say(f"created {main['kind']} {name} in namespace {namespace}")
    if not follow:
        return 0
    return _follow(cluster, kind, name, namespace, cancel)


def _follow(cluster: Cluster, kind: _Kind, name: str, namespace: str, cancel: bool) -> int:
    """Follow a job to its end, or to a signal; returns the exit code."""
    follower, stopped = _Follower(cluster, kind, name, namespace), 0
    delete = f"kubectl delete {kind.plural}.{kind.group} {name} -n {namespace}"
    with _interruptible():
        while True:
            try:
                if stopped:
                    say("deleting the job; its pods get SIGTERM, and are followed to their end")
                    cluster.delete(kind, name, namespace, wait=True)
                code = follower.run()
                return stopped or code
            except _Interrupted as error:
                if stopped or not cancel:
                    state = "is being deleted" if stopped else f"continues. End it with: {delete}"
                    say(f"the job is not followed any more, but {state}")
                    return stopped or 128 + error.number
                stopped = 128 + error.number


class Cluster:
    """The calls of the client that are needed.

    Args:
        context: of kubectl's configuration; None for the current one.

    Raises:
        ConfigurationError: no cluster is configured.
        MissingDependencyError: the client is not installed.
    """

    def __init__(self, context: str | None) -> None:
        client = require("kubernetes", purpose="accel k8s submit", install="kubernetes")
        self._errors: Any = client.client.exceptions.ApiException
        self._lost: Any = require("urllib3", purpose="accel k8s submit", install="kubernetes").exceptions.HTTPError
        self.namespace: str = _configure(client.config, context)
        self._objects, self._core = client.client.CustomObjectsApi(), client.client.CoreV1Api()
        self.address: str = str(self._core.api_client.configuration.host)

    def knows(self, kind: _Kind) -> bool:
        """Return True if the cluster has a kind of object.

        Raises:
            ConfigurationError: it does not answer, or does not let this user see these objects.
        """
        place = kind.group, kind.version, self.namespace, kind.plural
        try:
            self._objects.list_namespaced_custom_object(*place, limit=1)
        except self._errors as error:
            if error.status == 404:
                return False
            raise ConfigurationError(
                f"{self.address} refuses to list {kind.plural} in namespace {self.namespace}: {error.reason} "
                f"({error.status}). Ask for a role that may create and read them, or give another --context."
            ) from None
        except self._lost:
            raise ConfigurationError(f"{self.address} does not answer. Check with: kubectl cluster-info") from None
        return True

    def create(self, kind: _Kind, body: Mapping[str, Any], namespace: str) -> dict[str, Any]:
        """Create the object of a job."""
        place = kind.group, kind.version, namespace, kind.plural
        return dict(self._checked(body, namespace, lambda: self._objects.create_namespaced_custom_object(*place, body)))

    def create_service(self, body: Mapping[str, Any], namespace: str) -> None:
        """Create a service."""
        self._checked(body, namespace, lambda: self._core.create_namespaced_service(namespace, body))

    def delete(self, kind: _Kind, name: str, namespace: str, *, wait: bool = False) -> None:
        """Delete the object of a job and all that belongs to it; with ``wait`` it exists until its pods have ended."""
        place, policy = (kind.group, kind.version, namespace, kind.plural), "Foreground" if wait else "Background"
        try:
            self._objects.delete_namespaced_custom_object(*place, name, propagation_policy=policy)
        except self._errors as error:
            if error.status != 404:
                raise ConfigurationError(
                    f"the cluster refuses to delete {kind.plural} {name} in namespace {namespace}: {error.reason} "
                    f"({error.status}). It may run."
                ) from None

    def read(self, kind: _Kind, name: str, namespace: str) -> dict[str, Any] | None:
        """Return the object of a job; None if it was deleted."""
        place = kind.group, kind.version, namespace, kind.plural
        try:
            return dict(self._objects.get_namespaced_custom_object(*place, name))
        except self._errors as error:
            if error.status == 404:
                return None
            raise

    def pods(self, kind: _Kind, name: str, namespace: str) -> list[Any]:
        """Return the pods of a job, as objects of the client."""
        return list(self._core.list_namespaced_pod(namespace, label_selector=f"{kind.label}={name}").items)

    def log(self, pod: str, namespace: str) -> Any:
        """Return the log of a pod as it is written, a line of bytes after the other, each with its time."""
        options = {"container": CONTAINER, "follow": True, "timestamps": True, "_preload_content": False}
        return self._core.read_namespaced_pod_log(pod, namespace, **options)

    def is_gone(self, error: Exception) -> bool:
        """Return True if an error says that an object does not exist, or not any more."""
        return isinstance(error, self._errors) and error.status == 404

    def is_lost(self, error: Exception) -> bool:
        """Return True if an error may pass: the cluster does not answer, or is not ready."""
        return isinstance(error, self._lost) or (isinstance(error, self._errors) and (error.status or 500) >= 500)

    def _checked(self, body: Mapping[str, Any], namespace: str, call: Callable[[], Any]) -> Any:
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            return call()
        except self._errors as error:
            if error.status == 409:
                raise ConfigurationError(
                    f"there is a {kind} {name} in namespace {namespace}. Give another --name, or delete it: kubectl "
                    f"delete {kind.lower()} {name} -n {namespace}"
                ) from None
            if error.status == 404:
                raise ConfigurationError(
                    f"the cluster does not know {kind} ({body['apiVersion']}), or has no namespace {namespace}. "
                    "Install its controller, or give --kind Job, which every cluster has."
                ) from None
            raise ConfigurationError(
                f"the cluster refused {kind} {name} in namespace {namespace}: {error.reason} ({error.status}): "
                f"{str(error.body or '')[:500]}"
            ) from None
        except self._lost as error:
            raise ConfigurationError(
                f"the cluster does not answer: {error}. Check with: kubectl cluster-info"
            ) from None


def _configure(config: Any, context: str | None) -> str:
    """Configure the client, and return the namespace."""
    try:
        contexts, active = config.list_kube_config_contexts()
        config.load_kube_config(context=context)
    except config.ConfigException as error:
        if context is None and _NAMESPACE_FILE.is_file():
            config.load_incluster_config()
            return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        raise ConfigurationError(
            f"no cluster is configured{f' as --context {context}' if context else ''}: {error}. Check with: kubectl "
            "config get-contexts"
        ) from None
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


class _Follower:
    """Prints the logs of a job's pods until the job has ended."""

    def __init__(self, cluster: Cluster, kind: _Kind, name: str, namespace: str) -> None:
        self._cluster, self._kind, self._name, self._namespace = cluster, kind, name, namespace
        self._threads: dict[str, threading.Thread] = {}  # by name of the pod
        self._printed: dict[str, str] = {}  # the time of the last line, by name of the pod
        self._ended: set[str] = set()  # names of pods whose container has ended, and was not started again
        self._codes: dict[str, tuple[bool, str, int]] = {}  # whether it is an echo, time and exit code, by index
        self._seen: dict[str, float] = {}
        self._told: set[str] = set()

    def run(self) -> int:
        """Follow the job, and return its exit code.

        Raises:
            ConfigurationError: the cluster does not answer any more.
        """
        answered = time.monotonic()
        while True:
            try:
                job = self._cluster.read(self._kind, self._name, self._namespace)
                pods = self._cluster.pods(self._kind, self._name, self._namespace)
                # The last one of each index is the one that counts.
                for pod in sorted(pods, key=lambda one: one.metadata.creation_timestamp):
                    self._look_at(pod)
                answered = time.monotonic()
            except Exception as error:
                if not self._cluster.is_lost(error):
                    raise
                reason = str(error).split("\n", 1)[0]
                if time.monotonic() - answered > _LOST_SECONDS:
                    raise ConfigurationError(
                        f"the cluster has not answered for {_LOST_SECONDS:g} s: {reason}. The job may run."
                    ) from None
                self._tell(f"the cluster does not answer ({reason}); trying for {_LOST_SECONDS:g} s")
                time.sleep(_POLL_SECONDS)
                continue
            if job is None:
                self._finish_logs()
                say("the job was deleted")
                return 1
            if (code := self._exit_code(job)) is not None:
                return code
            time.sleep(_POLL_SECONDS)

    def _exit_code(self, job: Mapping[str, Any]) -> int | None:
        """Return the exit code, once the job has ended."""
        conditions = job.get("status", {}).get("conditions") or []
        ended = {one["type"]: one for one in conditions if one.get("status") == "True"}
        if self._kind.succeeded not in ended and "Failed" not in ended:
            return None
        self._finish_logs()
        if self._kind.succeeded in ended:
            return 0
        reason = ": ".join(filter(None, (ended["Failed"].get("reason"), ended["Failed"].get("message"))))
        code = min(self._codes.values(), default=(False, "", 1))[2]
        say(f"the job failed with exit code {code}{f' ({reason})' if reason else ''}")
        return code

    # -- pods --------------------------------------------------------------------------------------------------------

    def _look_at(self, pod: Any) -> None:
        """Begin to print the log of a pod that has started, or say why it has not; note how it ended."""
        name, first = pod.metadata.name, self._seen.setdefault(pod.metadata.name, time.monotonic())
        index = (pod.metadata.labels or {}).get(_INDEX_LABEL, "0")
        statuses = pod.status.container_statuses or []
        status = next((one for one in statuses if one.name == CONTAINER), None)
        state = None if status is None else status.state
        self._note_code(index, status)
        has_ended = state is not None and state.terminated is not None
        (self._ended.add if has_ended else self._ended.discard)(name)
        if state is not None and (state.running is not None or state.terminated is not None):
            thread = self._threads.get(name)
            # The restart policy may start a container again in its pod, as in a TrainJob's runtime.
            if thread is None or (state.running is not None and not thread.is_alive()):
                self._threads[name] = threading.Thread(target=self._print_log, args=(name, index), daemon=True)
                self._threads[name].start()
        elif time.monotonic() - first > _PENDING_SECONDS and (reason := _why_pending(pod, state)):
            self._tell(f"pod {name} waits: {reason}")

    def _note_code(self, index: str, status: Any) -> None:
        """Note how the container of the last pod of an index ended, or did before it was started again."""
        former = [] if status is None else [status.state, status.last_state]
        ends = [state.terminated for state in former if state is not None and state.terminated is not None]
        self._codes.pop(index, None)
        if ends and (code := ends[0].exit_code):
            self._codes[index] = code in _ECHOES, str(ends[0].finished_at or ""), code

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)

    def _print_log(self, pod: str, index: str) -> None:
        """Print the log of a pod; a connection that breaks is made again."""
        while True:
            is_last, printed = pod in self._ended, self._printed.get(pod, "")
            try:
                for line in self._cluster.log(pod, self._namespace):
                    at, _, text = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
                    if at > printed:
                        self._printed[pod] = at
                        # One write for a line: print makes two, and another pod's thread may run between them.
                        sys.stdout.write(f"[{index}] {text}\n")
                        sys.stdout.flush()
            except Exception as error:
                if self._cluster.is_gone(error):  # the pod was deleted: others take its place, or the job ends
                    return
                if not self._cluster.is_lost(error):
                    self._tell(f"the log of pod {pod} cannot be read: {str(error).splitlines()[0]}")
                    return
            if is_last:
                return
            time.sleep(_RETRY_SECONDS)

    def _finish_logs(self) -> None:
        """Wait for the last lines."""
        deadline = time.monotonic() + _LAST_LOGS_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))


def _why_pending(pod: Any, state: Any) -> str:
    """Why a pod has not started, as far as the cluster tells."""
    if state is not None and state.waiting is not None:
        return ": ".join(filter(None, (state.waiting.reason, state.waiting.message)))
    unmet = [one for one in pod.status.conditions or [] if one.status == "False" and one.message]
    return "; ".join(f"{one.reason}: {one.message}" for one in unmet)
