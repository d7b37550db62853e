"""The manifests of ``accel k8s`` with pods that fail or are evicted, on two virtual hosts.

The pods are processes with the variables and names that the controllers give them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from components import kube_cluster, namespaces
from components.kube_cluster import Cluster, wait_for

from accel_launch.commands import k8s

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import machines_come_and_go
from kill_replicas import SCRIPT, join
from replica_script import Settings

pytestmark = [
    pytest.mark.component,
    pytest.mark.slow,  # launchers in pods, which import torch
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts"),
    pytest.mark.timeout(960),
]

# Fails with 5 until it has been started three times, and then with 3: a launcher starts it again once, and so does the
# controller start the launchers.
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    with open("starts", "a+") as file:
        file.write("x")
        file.seek(0)
        starts = len(file.read())
    sys.exit(5 if starts < 3 else 3)
time.sleep(600)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts that run the pods of a job."""
    with namespaces.Hosts() as hosts:
        for name in hosts.names:
            (Path("/etc/netns") / name / "hosts").write_text("127.0.0.1 localhost\n")
        with Cluster(hosts, tmp_path, kube_cluster.image_variables()) as made:
            yield made


def _create(cluster: Cluster, kind: str, *words: str) -> None:
    """Start the job of a manifest with two pods."""
    file = cluster.folder / "job.yaml"
    job = ["--image", "image", "--kind", kind, "--name", "train", "--nodes", "2", "--output", str(file)]
    assert k8s.run(["manifest", *job, *words]) == 0
    cluster.create(list(yaml.safe_load_all(file.read_text())))


def _end(cluster: Cluster) -> str:
    """Wait for the end of the job, and return its reason."""
    assert cluster.controller is not None
    wait_for(lambda: bool(cluster.controller.conditions), "the end of the job", 300)
    return cluster.controller.conditions[0]["reason"]


@pytest.mark.parametrize(("kind", "reason"), [("Job", "FailedIndexes"), ("JobSet", "ReachedMaxRestarts")])
def test_pods_that_fail_are_started_again(cluster: Cluster, kind: str, reason: str) -> None:
    (cluster.folder / "s.py").write_text(FAIL)
    _create(cluster, kind, "--cpu", "--num_processes", "2", "--max_restarts", "1", "s.py")
    assert _end(cluster) == reason
    assert (cluster.folder / "starts").read_text() == "xxxx"
    failed = [pod for pod in [*cluster.gone, *cluster.pods] if pod.index == 1]
    assert failed[-1].exit_code() == 3 and len(failed) == 2


@pytest.mark.parametrize("grace", [3, 100])
@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_an_evicted_pod_continues_with_the_same_bits(cluster: Cluster, kind: str, grace: int) -> None:
    """Killed in the middle of a step that is longer than the grace period; and one that saves in it."""
    settings = Settings(str(cluster.folder), 30, batch=8, samples=1600, save_every=10, logical_shards=8)
    (cluster.folder / "pace").write_text("0.2")
    words = ["--grace-period", str(grace), "--cpu", "--num_processes", "2", "--max_restarts", "3", "--machine_timeout"]
    _create(cluster, kind, *words, "10", str(SCRIPT), json.dumps(asdict(settings)))
    watch = machines_come_and_go.Watch(cluster.folder)

    def trained(steps: int) -> bool:
        watch.look()
        assert cluster.controller is not None and not cluster.controller.conditions
        return watch.committed >= steps

    wait_for(lambda: trained(12), "twelve steps")
    if grace == 3:
        (cluster.folder / "pace").write_text("60")
        wait_for(lambda: _in_the_middle(cluster.folder), "the middle of a step", 20)
    assert cluster.evict(1) is (grace == 3)
    (cluster.folder / "pace").write_text("0")
    assert _end(cluster) in ("CompletionsReached", "AllJobsCompleted")
    assert len([pod for pod in [*cluster.gone, *cluster.pods] if pod.index == 1]) == 2
    found, alone = join(cluster.folder, 8, settings), machines_come_and_go.reference(settings)
    assert found.hashes == alone.hashes and not found.lost and not found.wrong
    assert not machines_come_and_go.repeated(cluster.folder, settings)
    assert (found.again > 0) is (grace == 3)


def _in_the_middle(folder: Path) -> bool:
    """Return True if a step of both processes began more than a second ago, and is not applied."""
    paths = list(folder.glob("*.jsonl"))
    # A step of the former length may be about to end.
    if len(paths) != 2 or any(time.time() - path.stat().st_mtime < 1 for path in paths):
        return False
    return all(json.loads(path.read_text().splitlines()[-1])[0] == "computed" for path in paths)
