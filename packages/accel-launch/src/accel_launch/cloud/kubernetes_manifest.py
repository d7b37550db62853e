"""Kubernetes objects that run a launch: a TrainJob of Kubeflow Trainer 2, a JobSet, or an indexed Job. Torch-free.

Each pod runs ``accel launch``, which finds its rank and the address of rank 0 in what the controllers set; see
:mod:`accel_launch.launch_context`. Secrets appear as references only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_state.preemption import PREEMPTED_EXIT_CODE

KINDS = ("TrainJob", "JobSet", "Job")
CONTAINER = "node"
"""The name of the container; Kubeflow's runtimes give it to the one that trains."""

_MANAGER = "accel.dev/launch"


@dataclass(frozen=True)
class PodJob:
    """What runs on the cluster."""

    name: str
    image: str
    command: Sequence[str]  # of each pod
    nodes: int = 1
    processes_per_node: int = 1
    device: str | None = None  # name of the resource, such as nvidia.com/gpu; None for CPUs
    devices_per_node: int = 0
    cpus: str | None = None  # of each pod, such as 8 or 500m
    memory: str | None = None  # of each pod, such as 64Gi
    shared_memory: str = "8Gi"  # size of /dev/shm, through which loader workers pass batches
    grace_seconds: int = 120  # between SIGTERM and SIGKILL
    max_restarts: int = 0
    namespace: str | None = None
    runtime: str = "torch-distributed"  # of a TrainJob
    service_account: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secret_keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # secret and key, by variable
    claims: Mapping[str, str] = field(default_factory=dict)  # paths, by persistent volume claim


def objects(job: PodJob, kind: str) -> list[dict[str, Any]]:
    """Return the objects to apply, in this order."""
    if kind == "TrainJob":
        return [_train_job(job)]
    if kind == "JobSet":
        return [_job_set(job)]
    service = [_service(job)] if job.nodes > 1 else []
    return [*service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": _job_spec(job)}]


def _metadata(job: PodJob) -> dict[str, Any]:
    return {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}


def _service(job: PodJob) -> dict[str, Any]:
    """Return a headless service: pods have DNS names before they are ready, because they wait for each other."""
    selector = {"batch.kubernetes.io/job-name": job.name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job_spec(job: PodJob) -> dict[str, Any]:
    """Return an indexed Job whose pods may each be started again as often as the processes may be restarted.

    When a pod fails, the launchers of the others end too, and all are started again. What an eviction or a node that is
    drained ends, and a run that was saved on a signal, counts as no failure.
    """
    pod = _pod(job)
    if job.nodes > 1:
        pod["subdomain"] = job.name
    return _indexed(job, pod, "Ignore", {"backoffLimitPerIndex": job.max_restarts, "maxFailedIndexes": 0})


def _indexed(job: PodJob, pod: Mapping[str, Any], action: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return an indexed Job, and what it does when a pod was evicted, or a run was saved on a signal."""
    saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED_EXIT_CODE]}
    rules = [
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": action, "onExitCodes": saved},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        **limits,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def _job_set(job: PodJob) -> dict[str, Any]:
    """Return a JobSet of one Job, which is started again as a whole."""
    # A Job that fails by its policy is started again without being counted.
    spec = _indexed(job, _pod(job), "FailJob", {"backoffLimit": 0})
    uncounted = {
        "name": "evicted_or_saved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [uncounted]},
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _train_job(job: PodJob) -> dict[str, Any]:
    """Return a TrainJob; its runtime decides how often it is started again."""
    pod = _pod(job)
    (container,) = pod["containers"]
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": container["command"],
        "numNodes": job.nodes,
        "numProcPerNode": job.processes_per_node,
    }
    for name, of_container in (("resourcesPerNode", "resources"), ("env", "env")):
        if of_container in container:
            trainer[name] = container[of_container]
    kept = ("terminationGracePeriodSeconds", "serviceAccountName", "volumes")
    patch: dict[str, Any] = {name: pod[name] for name in kept if name in pod}
    patch["containers"] = [{"name": CONTAINER, "volumeMounts": container["volumeMounts"]}]
    template = {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": {"spec": {"template": {"spec": patch}}}}]}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"name": job.runtime},
            "trainer": trainer,
            "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": template}}],
        },
    }


def _pod(job: PodJob) -> dict[str, Any]:
    claims = [
        {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}}
        for index, claim in enumerate(job.claims)
    ]
    mounts = [{"name": f"volume-{index}", "mountPath": path} for index, path in enumerate(job.claims.values())]
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}}
    container: dict[str, Any] = {"name": CONTAINER, "image": job.image, "command": list(job.command)}
    resources = _resources(job)
    if resources:
        container["resources"] = resources
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in job.environment.items()]
    environment += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in job.secret_keys.items()
    ]
    if environment:
        container["env"] = environment
    container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        **({"serviceAccountName": job.service_account} if job.service_account else {}),
        "containers": [container],
        "volumes": [shared, *claims],
    }


def _resources(job: PodJob) -> dict[str, Any]:
    asked = {name: value for name, value in (("cpu", job.cpus), ("memory", job.memory)) if value}
    devices = {job.device: job.devices_per_node} if job.device and job.devices_per_node else {}
    # Memory beyond a request makes a pod the first to be evicted; CPUs beyond it are free to use.
    limits = {**({"memory": job.memory} if job.memory else {}), **devices}
    return {
        **({"requests": {**asked, **devices}} if asked or devices else {}),
        **({"limits": limits} if limits else {}),
    }
