"""``accel k8s submit`` with the official client, and a server that runs the pods of a job on two virtual hosts.

They are processes with the variables and names that the controllers give them, and one is evicted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from components import environments, kube_cluster, namespaces
from components.digits import environment
from components.kube_cluster import Cluster, wait_for
from documents import all_commands, blocks, shows

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import machines_come_and_go
from kill_replicas import SCRIPT, join
from replica_script import Settings

_MISSING = namespaces.missing() or environments.missing("kubernetes")
pytestmark = [
    pytest.mark.component,
    pytest.mark.slow,  # launchers in pods, which import torch
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "there are hosts and a client"),
    pytest.mark.timeout(960),
]

KINDS = {"Job": "jobs", "JobSet": "jobsets", "TrainJob": "trainjobs"}
SHOW = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["STAGE"], flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
# Fails with 5 until it has been started three times, and then with 3: a launcher starts it again once, and so does the
# controller start the launchers.
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    with open("starts", "a+") as file:
        file.write("x")
        file.seek(0)
        starts = len(file.read())
    print("start", starts, flush=True)
    sys.exit(5 if starts < 3 else 3)
time.sleep(600)
"""
TOLD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told to end", flush=True)))
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts that run the pods of a Job."""
    with namespaces.Hosts() as hosts:
        for name in hosts.names:
            (Path("/etc/netns") / name / "hosts").write_text("127.0.0.1 localhost\n")
        with Cluster(hosts, tmp_path, kube_cluster.image_variables()) as made:
            yield made


class Submit:
    """``accel k8s submit`` of two pods, and what it prints."""

    def __init__(self, cluster: Cluster, *words: str, kind: str = "Job") -> None:
        command = [str(environments.find("kubernetes")), "-m", "accel_launch", "k8s", "submit", "--image", "image"]
        command += ["--kind", kind, "--name", "train", "--nodes", "2", *words]
        variables = environment(KUBECONFIG=str(cluster.config))
        self.process = subprocess.Popen(
            command, cwd=cluster.folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def says(self, text: str) -> bool:
        """Whether it has printed a text."""
        return any(text in line for line in self.lines)

    def ends(self) -> int:
        """Its exit code."""
        code = self.process.wait(300)
        self._reader.join(10)
        return code


def test_the_command_of_the_guide(cluster: Cluster) -> None:
    page = "docs/guides/kubernetes.md"
    (script,) = (block for block in blocks() if block.page == page and block.title == "train.py")
    (cluster.folder / script.title).write_text(script.text)
    (command,) = (one for one in all_commands() if one.block.page == page and one.line.startswith("accel k8s submit"))
    words = [str(environments.find("kubernetes")), "-m", "accel_launch", *command.words[1:]]
    variables = environment(KUBECONFIG=str(cluster.config))
    done = subprocess.run(words, cwd=cluster.folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done
    ranks = "".join(sorted(line for line in done.stdout.splitlines(keepends=True) if "] rank " in line))
    first, *rest = done.stderr.splitlines(keepends=True)  # in order with the lines of ranks, which come at any time
    assert shows(command.shown, first + ranks + "".join(rest)), done


@pytest.mark.parametrize("kind", KINDS)
def test_logs_are_followed_and_the_exit_code_is_that_of_the_job(cluster: Cluster, kind: str) -> None:
    (cluster.folder / "s.py").write_text(SHOW)
    words = ("--env", "STAGE=prod", "--cpu", "--num_processes", "2", "s.py", "0")
    first = Submit(cluster, *words, kind=kind)
    wait_for(lambda: bool(cluster.pods), "the pods are started")
    cluster.refuse = f"/{KINDS[kind]}/train"
    wait_for(lambda: first.says("the cluster does not answer ("), "it says that the server does not answer")
    cluster.refuse = ""
    assert first.ends() == 0, first.lines
    assert "[0] rank 0 of 2 prod\n" in first.lines and "[1] rank 1 of 2 prod\n" in first.lines
    if kind == "Job":
        service = cluster.objects["services/train"]["metadata"]["ownerReferences"][0]
        assert service["uid"] == cluster.objects["jobs/train"]["metadata"]["uid"]
    again = Submit(cluster, *words, kind=kind)
    assert again.ends() == 2 and again.says(f"there is a {kind} train in namespace ml. Give another --name")


def test_the_doctor(cluster: Cluster) -> None:
    def doctor(context: str = "") -> str:
        words = [str(environments.find("kubernetes")), "-m", "accel_launch", "doctor", f"--kubernetes{context}"]
        variables = environment(KUBECONFIG=str(cluster.config))
        return subprocess.run(words, env=variables, cwd=cluster.folder, capture_output=True, text=True).stdout

    found = doctor()
    assert ", namespace ml: Job, JobSet\n" in found and "no TrainJob: its controller is not installed" in found
    assert kube_cluster.TOKEN not in found and "all checks passed" in found
    cluster.refuse = "/jobs"
    assert "refuses to list jobs in namespace ml: Service Unavailable (503)" in doctor()
    cluster.config.write_text(cluster.config.read_text().replace(kube_cluster.TOKEN, "another"))
    cluster.refuse = ""
    found = doctor()
    assert "(401)" in found and "1 check failed" in found
    assert "no cluster is configured as --context elsewhere" in doctor("=elsewhere")
    cluster.config.unlink()
    assert "no cluster is configured" in doctor()


@pytest.mark.parametrize(
    ("kind", "reason"), [("Job", "FailedIndexes"), ("JobSet", "ReachedMaxRestarts"), ("TrainJob", "FailedJobs")]
)
def test_a_job_that_fails(cluster: Cluster, kind: str, reason: str) -> None:
    """The code is that of the rank that failed, and not of those that ended with it."""
    (cluster.folder / "s.py").write_text(SHOW)
    cluster.backoff = 2
    run = Submit(cluster, "--env", "STAGE=prod", "--cpu", "--num_processes", "2", "s.py", "3", kind=kind)
    assert run.ends() == 3, run.lines
    assert run.says(f"the job failed with exit code 3 ({reason})")
    # Those of a TrainJob's default runtime are started again in their pods, which have another log then.
    assert run.lines.count("[1] rank 1 of 2 prod\n") == (2 if kind == "TrainJob" else 1), run.lines


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_pods_that_are_started_again(cluster: Cluster, kind: str) -> None:
    """The code is that of the last start; pods that were deleted leave no message behind."""
    (cluster.folder / "s.py").write_text(FAIL)
    run = Submit(cluster, "--max_restarts", "1", "--cpu", "--num_processes", "2", "s.py", kind=kind)
    assert run.ends() == 3, run.lines
    assert all(run.says(f"[1] start {number}\n") for number in (1, 2, 3, 4)), run.lines
    assert not run.says("cannot be read"), run.lines


def test_ctrl_c_leaves_the_job_alone(cluster: Cluster) -> None:
    # A shell ignores it for what it runs in the background, and the command would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (cluster.folder / "s.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    run = Submit(cluster, "--cpu", "--num_processes", "2", "s.py")
    wait_for(lambda: run.says("[0] here") and run.says("[1] here"), "both pods run")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130
    assert run.says("continues. End it with: kubectl delete jobs.batch train -n ml"), run.lines
    assert all(pod.process.poll() is None for pod in cluster.pods) and "jobs/train" in cluster.objects


@pytest.mark.parametrize(("kind", "number"), [("JobSet", signal.SIGINT), ("TrainJob", signal.SIGTERM)])
def test_a_signal_that_cancels_the_job(cluster: Cluster, kind: str, number: signal.Signals) -> None:
    """With --cancel: the pods get SIGTERM, and their last lines are printed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (cluster.folder / "s.py").write_text(TOLD)
    run = Submit(cluster, "--cancel", "--cpu", "--num_processes", "2", "s.py", kind=kind)
    wait_for(lambda: run.says("[0] here") and run.says("[1] here"), "both pods run")
    run.process.send_signal(number)
    assert run.ends() == 128 + number, run.lines
    assert run.says("deleting the job") and run.says("the job was deleted"), run.lines
    assert run.says("[0] told to end") and run.says("[1] told to end"), run.lines
    assert f"{KINDS[kind]}/train" not in cluster.objects and not cluster.pods
    assert all(pod.process.poll() is not None for pod in cluster.gone)


@pytest.mark.parametrize("grace", [3, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_pod_continues_with_the_same_bits(cluster: Cluster, kind: str, grace: int) -> None:
    """Killed in the middle of a step that is longer than the grace period; and one that saves in it."""
    settings = Settings(str(cluster.folder), 30, batch=8, samples=1600, save_every=10, logical_shards=8)
    (cluster.folder / "pace").write_text("0.2")
    words = ["--grace-period", str(grace), "--cpu", "--num_processes", "2", "--max_restarts", "3", "--machine_timeout"]
    run = Submit(cluster, *words, "10", str(SCRIPT), json.dumps(asdict(settings)), kind=kind)
    watch = machines_come_and_go.Watch(cluster.folder)

    def trained(steps: int) -> bool:
        watch.look()
        assert run.process.poll() is None, run.lines
        return watch.committed >= steps

    wait_for(lambda: trained(12), "twelve steps")
    if grace == 3:
        (cluster.folder / "pace").write_text("60")
        wait_for(lambda: _in_the_middle(cluster.folder), "the middle of a step", 20)
    assert cluster.evict(1) is (grace == 3)
    (cluster.folder / "pace").write_text("0")
    assert run.ends() == 0, run.lines
    assert len([pod for pod in [*cluster.gone, *cluster.pods] if pod.index == 1]) == 2
    found, alone = join(cluster.folder, 8, settings), machines_come_and_go.reference(settings)
    assert found.hashes == alone.hashes and not found.lost and not found.wrong
    assert not machines_come_and_go.repeated(cluster.folder, settings)
    assert (found.again > 0) is (grace == 3)


def _in_the_middle(folder: Path) -> bool:
    """Whether a step of both processes has begun, and is not applied."""
    latest = [path.read_text().splitlines()[-1] for path in folder.glob("*.jsonl")]
    return len(latest) == 2 and all(json.loads(line)[0] == "computed" for line in latest)
