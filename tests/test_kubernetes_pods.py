"""The pods of an indexed Job as processes on two hosts of a virtual network, with the variables that pods have."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from components import namespaces, torchless
from components.digits import environment

_MISSING = namespaces.missing()
pytestmark = [
    pytest.mark.component,
    pytest.mark.slow,  # two launchers, which import torch
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "hosts can be made"),
    pytest.mark.timeout(960),
]

FIRST = "train-0.train.default.svc.cluster.local"
SUM = """
import os
from torchless import Group
group = Group()
print(group.rank, group.sum(group.rank + 1), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], flush=True)
group.sum(0)
"""


def test_pods_find_each_other(tmp_path: Path) -> None:
    """By the index and the name of each; the name of the first pod resolves when it has an address, and not before."""
    (tmp_path / "s.py").write_text(SUM)
    torchless.copy_to(tmp_path)
    words = ("manifest", "--image", "image", "--kind", "Job", "--name", "train", "--nodes", "2", "--num_processes", "4")
    command = [sys.executable, "-m", "accel_launch", "k8s", *words, "--cpu", "s.py"]
    written = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    _, job = yaml.safe_load_all(written.stdout)
    accel, *rest = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert accel == "accel"
    with namespaces.Hosts() as hosts:
        lines = [f"10.77.0.{index + 1} train-{index}.train.default.svc.cluster.local train-{index}" for index in (0, 1)]
        files = [Path("/etc/netns") / name / "hosts" for name in hosts.names]
        for file, line in zip(files, lines, strict=True):
            file.write_text(f"127.0.0.1 localhost\n{line}\n")
        pods = []
        for index in (1, 0):
            pods.append(_start(hosts, index, rest, tmp_path))
            if index:
                line = _read_until(pods[0], "to resolve")
                assert line.startswith(f"accel launch: waiting for the name {FIRST} to resolve"), line
                # In place: the file is mounted in the namespace of each host.
                for file, further in zip(files, reversed(lines), strict=True):
                    with file.open("a") as opened:
                        opened.write(f"{further}\n")
        outputs = [pod.communicate(timeout=600) for pod in pods]
        shown, _ = _start(hosts, 1, [rest[0], "--dry_run", "--json", *rest[1:]], tmp_path).communicate(timeout=100)
    first, second = json.loads(shown)
    assert [one["machine"] for one in (first, second)] == ["machine 0 of 2", "machine 1 of 2, this one"]
    assert [rank["RANK"] for one in (first, second) for rank in one["ranks"]] == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for one in (first, second) for rank in one["ranks"]} == {FIRST}
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert sorted(outputs[1][0].splitlines()) == ["0 10 0 0", "1 10 1 0"], outputs
    assert sorted(outputs[0][0].splitlines()) == ["2 10 0 1", "3 10 1 1"], outputs


def _start(hosts: namespaces.Hosts, index: int, words: list[str], folder: Path) -> subprocess.Popen[str]:
    """What the container of a pod runs."""
    script = f'hostname train-{index}; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "accel_launch", *words]
    return subprocess.Popen(
        hosts.command(index, command),
        cwd=folder,
        env=environment(JOB_COMPLETION_INDEX=str(index), KUBERNETES_SERVICE_HOST="10.96.0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _read_until(pod: subprocess.Popen[str], text: str) -> str:
    assert pod.stderr is not None
    deadline = time.monotonic() + 300
    for line in pod.stderr:
        if text in line:
            return line
        assert time.monotonic() < deadline
    raise AssertionError(f"the pod ended without {text!r}")
