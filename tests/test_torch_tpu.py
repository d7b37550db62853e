"""torch_tpu as its wheel is: the names that accel uses, a machine without a TPU, and the variables of a launch.

`scripts/components tpu` makes the environment. No TPU is there, so nothing runs on one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from components.digits import environment
from components.environments import find, missing

NAMES = """
import inspect, json, sys
import torch, torch_tpu
from torch.tpu import distributed
from accel_state import devices

tpu = devices.get("tpu")
needed = "get_device_properties manual_seed_all".split()
print("RESULT " + json.dumps({
    "missing": [name for name in needed if not hasattr(torch.tpu, name)],
    "generators": "default_generators" in dir(torch.tpu),
    "parameters": list(inspect.signature(distributed.set_tpu_launch_env).parameters),
    "available": tpu.is_available(),
    "count": tpu.device_count(),
    "device": devices.detect().name,
    "seeded": tpu.manual_seed_all(3),
}))
"""

# torch_tpu takes seconds to import, and loads itself with torch.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed() -> None:
    if missing("tpu"):
        pytest.skip(missing("tpu"))


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(find("tpu")), *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_names_and_a_machine_without_a_tpu(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", NAMES)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.rindex("RESULT ") + 7 :])
    assert result == {
        "missing": [],
        "generators": True,
        "parameters": ["nnodes", "nproc_per_node"],
        "available": False,
        "count": 0,
        "device": "cpu",
        "seeded": None,
    }


def test_variables_of_a_launch(tmp_path: Path) -> None:
    """With the topology given, torch_tpu asks no chip; it numbers the hosts of a slice."""
    (tmp_path / "train.py").write_text("")
    words = ["-m", "accel_launch", "launch", "--tpu", "--dry_run", "--json"]
    done = run(tmp_path, *words, "--num_processes=4", "train.py", TORCH_TPU_TOPOLOGY="2,2,1")
    assert done.returncode == 0, done.stderr
    (machine,) = json.loads(done.stdout)
    assert machine["environment"]["TORCH_TPU_TOPOLOGY"] == "2,2,1" and len(machine["ranks"]) == 4
    assert machine["environment"]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count("localhost:") == 4
    hosts = {"TPU_WORKER_HOSTNAMES": "one,two", "JOB_COMPLETION_INDEX": "1", "TORCH_TPU_DEVICES_PER_HOST": "4"}
    done = run(tmp_path, *words, "train.py", TORCH_TPU_TOPOLOGY="2,4,1", **hosts)
    assert done.returncode == 0, done.stderr
    machines = json.loads(done.stdout)
    assert [rank["RANK"] for machine in machines for rank in machine["ranks"]] == [str(rank) for rank in range(8)]
    assert {rank["MASTER_ADDR"] for machine in machines for rank in machine["ranks"]} == {"one"}
    assert "this one" in machines[1]["machine"]
    addresses = machines[1]["environment"]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert addresses == [f"{host}:{port}" for host in ("one", "two") for port in range(8070, 8074)]


def test_without_a_tpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run(tmp_path, "-m", "accel_launch", "launch", "--tpu", "train.py")
    assert done.returncode == 2 and "torch_tpu cannot start processes here" in done.stderr, done.stderr
