"""What the controllers of Jobs, JobSets and TrainJobs do with pods, for the cluster in kube_cluster.py.

Each reads the object as it was created. Names, variables, restarts and conditions are those of Kubernetes 1.37,
JobSet v1alpha2 and the runtime torch-distributed of Kubeflow Trainer 2.3.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kube_cluster import Cluster, Pod

_BACK_OFF_SECONDS = 3.0  # before a pod is started again; 10 s in Kubernetes
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")  # of a failure policy


class JobController:
    """That of indexed Jobs, in this class, and the base of the others."""

    kind, complete, completed = "Job", "Complete", "CompletionsReached"

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        self.cluster, self.name = cluster, str(body["metadata"]["name"])
        self.spec = self.job_spec(body)
        self.pod_spec: dict[str, Any] = self.spec["template"]["spec"]
        self.job = self.name  # the name of the Job whose pods these are
        self.subdomain = str(self.pod_spec.get("subdomain", ""))
        self.labels = {"batch.kubernetes.io/job-name": self.job}
        self.conditions: list[dict[str, str]] = []
        self.done: set[int] = set()  # indexes that have succeeded

    def job_spec(self, body: dict[str, Any]) -> dict[str, Any]:
        """The spec of the Job whose pods these are."""
        return dict(body["spec"])

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        return float(self.pod_spec["terminationGracePeriodSeconds"])

    def begin(self) -> None:
        """Start all pods."""
        for index in range(self.spec["completions"]):
            self.cluster.start_pod(self, index)

    def look(self) -> None:
        """See which pods have ended, and do what the object says."""
        if self.conditions:
            return
        for pod in {pod.index: pod for pod in self.cluster.pods}.values():
            code = pod.process.poll()
            if code == 0:
                self.done.add(pod.index)
            elif code is not None:
                self.failed(pod, pod.exit_code())
                return
        if len(self.done) == self.spec["completions"]:
            self.end(self.complete, self.completed)

    def failed(self, pod: Pod, code: int) -> None:
        """Start the pod of an index again, or end the Job."""
        if self.is_ignored(pod, code):
            self.cluster.start_pod(self, pod.index)
        elif sum(one.index == pod.index and not one.disrupted for one in self.cluster.pods) > self.limit():
            self.end("Failed", "FailedIndexes")
        else:
            time.sleep(_BACK_OFF_SECONDS)
            self.cluster.start_pod(self, pod.index)

    def is_ignored(self, pod: Pod, code: int) -> bool:
        """Whether a rule of the pod failure policy fits: all of ours are for these."""
        return pod.disrupted or code in _codes(self.spec)

    def limit(self) -> int:
        """How often a pod may be started again."""
        return int(self.spec["backoffLimitPerIndex"])

    def end(self, kind: str, reason: str) -> None:
        """End what still runs, and note how the job has ended."""
        self.cluster.terminate(self.cluster.pods, self.grace)
        self.conditions = [{"type": kind, "status": "True", "reason": reason}]


class JobSetController(JobController):
    """That of a JobSet of one Job, all of whose pods are started again together."""

    kind, complete, completed = "JobSet", "Completed", "AllJobsCompleted"

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        self.policy: dict[str, Any] = body["spec"].get("failurePolicy", {})
        for rule in self.policy.get("rules", []):
            assert _RULE_NAME.fullmatch(rule["name"]), f"JobSet's webhook refuses the name {rule['name']}"
        super().__init__(cluster, body)
        self.job, self.subdomain, self.counted = f"{self.name}-node-0", self.name, 0
        self.labels = {"batch.kubernetes.io/job-name": self.job, "jobset.sigs.k8s.io/jobset-name": self.name}

    def job_spec(self, body: dict[str, Any]) -> dict[str, Any]:
        (replicated,) = body["spec"]["replicatedJobs"]
        assert (replicated["name"], replicated["replicas"]) == ("node", 1)
        return dict(replicated["template"]["spec"])

    def failed(self, pod: Pod, code: int) -> None:
        """The Job fails with its first pod, so all of them are ended; the JobSet deletes and makes them again."""
        assert (self.spec["backoffLimit"], self.pod_spec["restartPolicy"]) == (0, "Never")
        reason = "PodFailurePolicy" if self.is_ignored(pod, code) else "BackoffLimitExceeded"
        rules = [rule for rule in self.policy["rules"] if reason in rule["onJobFailureReasons"]]
        is_counted = not rules or rules[0]["action"] != "RestartJobSetAndIgnoreMaxRestarts"
        if is_counted and self.counted >= self.policy["maxRestarts"]:
            self.end("Failed", "ReachedMaxRestarts")
            return
        self.counted += is_counted
        self.cluster.terminate(self.cluster.pods, self.grace)
        self.cluster.delete_pods()
        self.begin()


class TrainJobController(JobSetController):
    """That of a TrainJob with the runtime torch-distributed, which says nothing of failures.

    A container that fails is started again in its pod, since a JobSet's pods have the restart policy OnFailure if they
    name none, until their Job has seen as many failures as its ``backoffLimit``.
    """

    kind, complete = "TrainJob", "Complete"

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        super().__init__(cluster, body)
        self.failures = 0

    def job_spec(self, body: dict[str, Any]) -> dict[str, Any]:
        trainer, (patch,) = body["spec"]["trainer"], body["spec"]["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = dict(job["template"]["spec"]["template"]["spec"])
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        variables = [
            *trainer.get("env", []),
            {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": f"{self.name}-node-0-0.{self.name}"},
            {"name": "PET_MASTER_PORT", "value": "29500"},
        ]
        pod["containers"] = [{**pod["containers"][0], "command": trainer["command"], "env": variables}]
        return {"completions": trainer["numNodes"], "backoffLimit": self.cluster.backoff, "template": {"spec": pod}}

    def failed(self, pod: Pod, code: int) -> None:
        """A container runs again in its pod; an evicted pod is deleted, and another one made."""
        self.failures += 1
        if self.failures > self.spec["backoffLimit"]:
            self.cluster.terminate(self.cluster.pods, self.grace)
            self.cluster.delete_pods()  # those that would be started again
            self.end("Failed", "FailedJobs")
        elif pod.disrupted:
            self.cluster.pods.remove(pod)
            self.cluster.gone.append(pod)
            self.cluster.start_pod(self, pod.index)
        else:
            self.cluster.restart_container(pod)


def _codes(spec: dict[str, Any]) -> list[int]:
    """The exit codes for which a Job has a rule."""
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    return [code for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]]


CONTROLLERS = {one.kind: one for one in (JobController, JobSetController, TrainJobController)}
