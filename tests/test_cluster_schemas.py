"""What ``accel k8s`` and ``accel sky`` write, checked by the schemas and parsers of those who read it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from components import environments
from components.digits import environment

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

FULL = [
    *("--image", "registry.example.com/train:1", "--nodes", "2", "--gpus-per-node", "4", "--cpus", "8"),
    *("--memory", "64Gi", "--volume", "data:/data", "--env", "STAGE=prod", "--secret", "HF_TOKEN=hub:token"),
    *("--service-account", "trainer", "--namespace", "ml", "--max_restarts", "3", "train.py", "--lr", "0.1"),
]

# from_dict drops what it does not know without a word, so what comes back is compared with what went in.
COMPARE = """
import json, sys, yaml
import kubeflow_trainer_api.models as models
for document in yaml.safe_load_all(open(sys.argv[1])):
    kind = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}[document["kind"]]
    print(json.dumps([document, json.loads(kind.from_dict(document).to_json())]))
"""

TASK = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps([task.name, task.num_nodes, resources.accelerators, resources.use_spot, task.run, task.setup,
                  resources.job_recovery, dict(task.envs)]))
"""


def _write(folder: Path, *words: str) -> Path:
    file = folder / "file.yaml"
    file.unlink(missing_ok=True)
    verbs = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
    command = [sys.executable, "-m", "accel_launch", *verbs, "--output", str(file), *words[len(verbs) :]]
    subprocess.run(command, check=True, cwd=folder, env=environment(), capture_output=True)
    return file


def _run(component: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(environments.find(component)), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment())


def _plain(value: object) -> object:
    """Numbers and texts of quantities are the same to Kubernetes: 2, 2.0 and "2"."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


@pytest.mark.skipif(bool(environments.missing("kubernetes")), reason=environments.missing("kubernetes") or "installed")
class TestKubernetes:
    def test_a_job_passes_the_schema_of_the_api(self, tmp_path: Path) -> None:
        file = _write(tmp_path, "k8s", "manifest", "--kind", "Job", *FULL)
        check = ("-m", "kubernetes_validate", "--strict", "-k", "1.37.0", file)
        done = _run("kubernetes", *check)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("passed for resource") == 2, done.stdout
        file.write_text(file.read_text().replace("backoffLimitPerIndex", "backoffLimitPerindex"))
        assert _run("kubernetes", *check).returncode != 0, "a misspelt field is noticed"

    @pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
    def test_the_types_of_kubeflow_and_jobset_know_every_field(self, tmp_path: Path, kind: str) -> None:
        file = _write(tmp_path, "k8s", "manifest", "--kind", kind, *FULL)
        done = _run("kubernetes", "-c", COMPARE, file)
        assert done.returncode == 0, done.stderr
        document, known = json.loads(done.stdout)
        assert _plain(known) == _plain(document)
        file.write_text(file.read_text().replace("terminationGracePeriodSeconds", "terminationGracePeriod"))
        document, known = json.loads(_run("kubernetes", "-c", COMPARE, file).stdout)
        assert _plain(known) != _plain(document), "a misspelt field is noticed"


@pytest.mark.slow  # importing SkyPilot takes 7 s of a core, twice
@pytest.mark.skipif(bool(environments.missing("sky")), reason=environments.missing("sky") or "installed")
def test_skypilot_parses_the_task(tmp_path: Path) -> None:
    words = ("--accelerators", "H100:8", "--nodes", "2", "--spot", "--setup", "pip install accel", "--env", "A=1")
    file = _write(tmp_path, "sky", *words, "--max_restarts", "3", "train.py", "--lr", "0.1")
    done = _run("sky", "-c", TASK, file)
    assert done.returncode == 0, done.stderr
    name, nodes, accelerators, spot, run, setup, recovery, envs = json.loads(done.stdout.splitlines()[-1])
    assert (name, nodes, accelerators, spot) == ("train", 2, {"H100": 8}, True)
    assert (run, setup, envs["A"]) == ("accel launch --max_restarts=3 train.py --lr 0.1\n", "pip install accel\n", "1")
    assert (recovery["max_restarts_on_errors"], recovery["recover_on_exit_codes"]) == (3, [75])
    file.write_text(file.read_text().replace("num_nodes", "num_node"))
    assert "num_node" in _run("sky", "-c", TASK, file).stderr
