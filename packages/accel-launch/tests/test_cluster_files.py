"""``accel k8s`` and ``accel sky``: the files that they write; test_cluster_schemas.py has the clusters' checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_launch.commands import k8s, sky
from accel_state.errors import ConfigurationError

IMAGE = ("--image", "registry.example.com/train:1")


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def written(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert k8s.run(["manifest", *IMAGE, *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_names_of_pods_that_are_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    """A JobSet's pods are called NAME-node-0-INDEX-abcde."""
    name = "a" * 49
    assert written(capsys, "--kind", "Job", "--name", name, "s.py")
    for kind in ("JobSet", "TrainJob"):
        with pytest.raises(ConfigurationError, match="at most 48 characters"):
            k8s.run(["manifest", *IMAGE, "--kind", kind, "--name", name, "s.py"])
        assert written(capsys, "--kind", kind, "--name", name[1:], "s.py")


def task(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert sky.run(list(words)) == 0
    made: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return made


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


def test_a_job_and_its_headless_service(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = written(capsys, "--kind", "Job", "--nodes", "2", "--gpus-per-node", "8", "train.py", "--lr", "0.1")
    pod = pod_of(job)
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["publishNotReadyAddresses"], "the pods wait for each other before they are ready"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    (container,) = pod["containers"]
    script = ["train.py", "--lr", "0.1"]
    assert container["command"] == ["accel", "launch", "--num_processes=16", "--num_machines=2", *script]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (job,) = written(capsys, "--kind", "Job", "train.py")
    assert pod_of(job)["containers"][0]["command"] == ["accel", "launch", "--num_processes=1", "train.py"]


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet", "Job"])
def test_shared_memory_volumes_and_grace_period(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ("--shared-memory", "16Gi", "--grace-period", "300", "--volume", "data:/data", "--service-account", "me")
    manifest = written(capsys, "--kind", kind, *words, "train.py")[-1]
    if kind == "TrainJob":
        (patch,) = manifest["spec"]["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        manifest = {"kind": "Job", "spec": job["template"]["spec"]}
    pod = pod_of(manifest)
    assert (pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == (300, "me")
    memory, claim = pod["volumes"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert claim["persistentVolumeClaim"] == {"claimName": "data"}
    paths = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert paths == {memory["name"]: "/dev/shm", claim["name"]: "/data"}


def test_restarts_agree_with_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """What an eviction ends, or was saved on a signal, is started again without being counted."""
    _, job = written(capsys, "--kind", "Job", "--nodes", "2", "--max_restarts", "3", "train.py")
    assert (job["spec"]["backoffLimitPerIndex"], job["spec"]["maxFailedIndexes"]) == (3, 0)
    evicted, saved = job["spec"]["podFailurePolicy"]["rules"]
    assert evicted["action"] == saved["action"] == "Ignore" and saved["onExitCodes"]["values"] == [75]
    assert "--max_restarts=3" in pod_of(job)["containers"][0]["command"]
    assert pod_of(job)["restartPolicy"] == "Never"
    (jobset,) = written(capsys, "--kind", "JobSet", "--nodes", "2", "--max_restarts", "3", "train.py")
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0, "the JobSet starts all pods again, and not the Job one of them"
    assert {rule["action"] for rule in inner["podFailurePolicy"]["rules"]} == {"FailJob"}


def test_a_train_job_leaves_counts_to_its_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = written(capsys, "--nodes", "2", "--gpus-per-node", "4", "--device", "amd", "--max_restarts", "2", "t.py")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["accel", "launch", "--max_restarts=2", "t.py"]
    assert trainer["resourcesPerNode"]["limits"] == {"amd.com/gpu": 4}


def test_the_settings_of_a_file_and_of_variables_reach_the_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever sets them here: the nodes have neither the file nor the variables."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmachine_rank: 0\n"
        "mixed_precision: no\nnum_machines: 1\nnum_processes: 4\nsame_network: true\nrdzv_backend: static\n"
    )
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _, job = written(capsys, "--kind", "Job", "--nodes", "2", "--config_file", str(file), "train.py")
    command = pod_of(job)["containers"][0]["command"]
    expected = {"--use_fsdp", "--fsdp_version=2", "--mixed_precision=bf16", "--distributed_type=FSDP"}
    assert set(command[2:-1]) == expected | {"--num_processes=4", "--num_machines=2"}
    line = task(capsys, "--nodes", "2", "--config_file", str(file), "train.py")["run"]
    assert set(line.split()[2:-1]) == expected | {"--num_processes=4"}


def test_secrets_are_references(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = written(capsys, "--kind", "Job", "--secret", "HF_TOKEN=hub:token", "--env", "STAGE=prod", "train.py")
    plain, secret = pod_of(job)["containers"][0]["env"]
    assert plain == {"name": "STAGE", "value": "prod"}
    assert secret == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert task(capsys, "--secret", "HF_TOKEN", "train.py")["secrets"] == {"HF_TOKEN": None}
    value = "hf_abcdefghijklmnopqrstuvwx"
    for write in (written, task):
        with pytest.raises(
            ConfigurationError, match=r"--env HF_TOKEN=\(hidden\): the value would be readable"
        ) as error:
            write(capsys, "--env", f"HF_TOKEN={value}", "t.py")
        assert value not in str(error.value)


def test_what_concerns_this_machine_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcd")
    monkeypatch.setenv("AWS_PROFILE", "me")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (job,) = written(capsys, "--kind", "Job", "train.py")
    assert pod_of(job)["containers"][0]["command"] == ["accel", "launch", "--num_processes=1", "train.py"]


def test_a_task_for_spot_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--accelerators", "H100:8", "--nodes", "2", "--spot", "--setup", "pip install accel", "--storage")
    made = task(capsys, *words, "/ckpt=s3://bucket/run", "--max_restarts", "3", "train.py", "--name", "a b; $(date)")
    assert (made["name"], made["num_nodes"], made["setup"]) == ("train", 2, "pip install accel\n")
    assert made["resources"]["use_spot"] is True and made["resources"]["accelerators"] == "H100:8"
    assert made["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert made["run"] == "accel launch --max_restarts=3 train.py --name 'a b; $(date)'\n"
    assert made["file_mounts"] == {"/ckpt": {"source": "s3://bucket/run", "mode": "MOUNT"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2", "--num_processes", "3", "t.py"], "num_processes 3 is not a multiple of --nodes 2"),
        (["--num_machines", "2", "t.py"], "--num_machines comes from the cluster"),
        (["--gpus-per-node", "2", "--cpu", "t.py"], "--gpus-per-node 2 and --cpu contradict each other"),
        (["--name", "Train_1", "t.py"], "'Train_1' is not a name of at most 53 lower-case letters"),
        (["--device", "gpus", "t.py"], "'gpus' is not one of nvidia, amd, nor a resource"),
        (["--memory", "64 GB", "t.py"], "'64 GB' is not a quantity of Kubernetes"),
        (["--secret", "HF_TOKEN=hf_x", "t.py"], "--secret HF_TOKEN: give NAME=SECRET:KEY"),
        (["--volume", "data:relative", "t.py"], "give CLAIM:PATH with an absolute path"),
        (["--env", "1A=2", "t.py"], "--env 1A: give NAME=VALUE"),
    ],
)
def test_what_a_manifest_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        written(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine_rank", "1", "t.py"], "--machine_rank comes from SkyPilot"),
        (["--accelerators", "H100:8", "--cpu", "t.py"], "--accelerators H100:8 and --cpu contradict each other"),
        (["--accelerators", "8 x H100", "t.py"], "'8 x H100' is not NAME:N"),
        (["--storage", "data=bucket", "t.py"], "give PATH=URL with an absolute path"),
        (["--secret", "A=b", "t.py"], "give the name of a variable, without its value"),
    ],
)
def test_what_a_task_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task(capsys, *words)


@pytest.mark.parametrize(("make", "what"), [(written, "pods"), (task, "nodes")])
def test_a_range_of_machines_in_a_file_is_refused(capsys, tmp_path: Path, make: Any, what: str) -> None:
    """It would be left out in silence, since --nodes gives their number."""
    file = tmp_path / "range.yaml"
    file.write_text("num_machines: 2:8\nmain_process_ip: 10.0.0.1\n")
    with pytest.raises(ConfigurationError, match=f"2:8 in .*a fixed number of {what}, which --nodes"):
        make(capsys, "--nodes", "2", "--config_file", str(file), "t.py")


@pytest.mark.parametrize(("make", "option"), [(written, "--gpus-per-node=2"), (task, "--accelerators=H100:8")])
def test_accelerators_for_a_file_that_uses_the_cpu_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any, option: str
) -> None:
    settings = tmp_path / "cpu.yaml"
    settings.write_text("use_cpu: true\n")
    with pytest.raises(ConfigurationError, match=rf"{option.replace('=', ' ')} and use_cpu: true .*line 1 contradict"):
        make(capsys, option, "--config_file", str(settings), "t.py")
    make(capsys, "--config_file", str(settings), "t.py")


def test_a_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    assert k8s.run(["manifest", *IMAGE, "--output", str(file), "train.py"]) == 0
    assert f"kubectl apply -f {file}" in capsys.readouterr().err and yaml.safe_load(file.read_text())["kind"]
    with pytest.raises(ConfigurationError, match="exists. Choose another name"):
        sky.run(["--output", str(file), "train.py"])


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match="'submit' is not a command of accel k8s. Allowed: manifest, whose"):
        k8s.run(["submit", *IMAGE, "train.py"])
