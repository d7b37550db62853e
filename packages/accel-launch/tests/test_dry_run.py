"""--dry_run prints, for each machine, the commands that a launch would start, and starts nothing."""

from __future__ import annotations

import json
import re
import sys

import pytest

from accel_launch.config.read import read_config
from accel_launch.config.write import nest, write_file
from accel_launch.elastic.worker import decode
from accel_state.options.resources import MachineRange

SHOW = """
import json, os, sys
with open(f"rank{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump([sys.argv, dict(os.environ)], file)
"""


@pytest.fixture
def dry(shell):
    """The starts of ``accel launch --dry_run --json WORDS``."""
    shell.write("s.py", SHOW)

    def run(*words: str, **env: str) -> list[dict]:
        result = shell.call("launch", "--dry_run", "--json", "-q", *words, **env)
        assert result.returncode == 0, result.stderr
        assert not list(shell.folder.glob("rank*.json")), "nothing is started"
        return json.loads(result.stdout)

    return run


@pytest.mark.parametrize("count", ["1", "2"])
def test_printed_commands_are_those_that_are_started(shell, dry, free_port, count) -> None:
    port = str(free_port())
    words = [
        "--cpu",
        "--num_processes",
        count,
        "--mixed_precision",
        "bf16",
        "--main_process_port",
        port,
        "s.py",
        "--lr",
        "a b",
    ]
    (start,) = dry(*words)
    assert shell.launch("-q", *words).returncode == 0
    ranks = start["ranks"]
    for rank, variables in enumerate(ranks):
        argv, environment = json.loads((shell.folder / f"rank{rank}.json").read_text())
        shown = {**start["environment"], **variables}
        assert {name: environment.get(name) for name in shown} == shown
        assert argv == start["command"][-3:] == ["s.py", "--lr", "a b"]
    assert len(ranks) == int(count)


def test_every_machine_is_shown(dry) -> None:
    words = (
        "--cpu",
        "--num_processes=4",
        "--num_machines=2",
        "--machine_rank=1",
        "--main_process_ip=10.0.0.1",
        "--max_restarts=2",
        "s.py",
        "x",
    )
    first, second = dry(*words)
    assert [start["machine"] for start in (first, second)] == ["machine 0 of 2", "machine 1 of 2, this one"]
    assert [rank["RANK"] for start in (first, second) for rank in start["ranks"]] == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for start in (first, second) for rank in start["ranks"]} == {"10.0.0.1"}
    assert any("10.0.0.1:29500" in note and "after 30 s (machine_timeout)" in note for note in first["notes"])
    assert "started there by: accel launch" in first["notes"][0] and "--machine_rank=0 s.py x" in first["notes"][0]
    assert any("up to 2 times" in note for note in second["notes"])
    _, other = dry(
        "--cpu", "--num_processes=2", "--num_machines=2", "--main_process_ip=h", "--rdzv_backend=c10d", "s.py"
    )
    assert any("meet at h:29500 and are given their ranks" in note for note in other["notes"])
    assert "MASTER_ADDR" not in other["ranks"][0] and "machine_rank" not in other["notes"][1]


def test_a_range_of_machines(dry, tmp_path) -> None:
    starts = dry("--cpu", "--num_processes=4", "--num_machines=1:2", "--main_process_ip=h", "s.py")
    assert [start["machine"] for start in starts] == ["machine 0 of up to 2, this one", "machine 1 of up to 2"]
    assert {rank["GROUP_WORLD_SIZE"] for start in starts for rank in start["ranks"]} == {"2"}
    assert any(
        re.match("begins with 1 of them; ranks .* follow from the machines", note) for note in starts[0]["notes"]
    )
    assert any("meet at h:29500 and are given their ranks" in note for note in starts[0]["notes"])
    assert "machine_rank" not in starts[1]["notes"][1]
    for name in ("c.yaml", "c.json"):
        write_file(tmp_path / name, nest({"num_machines": MachineRange(4, 2), "rdzv_backend": "c10d"}))
        assert read_config(tmp_path / name).entries["num_machines"].value == "2:4"


def test_as_text(shell) -> None:
    shell.write("s.py", SHOW)
    out = shell.call("launch", "--dry_run", "-q", "--cpu", "--num_processes", "2", "s.py", "a b").stdout
    lines = out.splitlines()
    assert (
        lines[0] == "this machine: 2 processes"
        and lines[1].startswith("  command: ")
        and lines[1].endswith(" s.py 'a b'")
    )
    assert "  ACCELERATE_USE_CPU=true" in lines and any(
        line.startswith("  RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 ") for line in lines
    )


class TestMpirun:
    def test_the_hostfile_sets_the_number_of_machines(self, shell, dry) -> None:
        shell.write("hosts", "node0 slots=4  # the first\nnode1:4\n\n")
        (start,) = dry(
            "--cpu",
            "--num_processes=4",
            "--mpirun_hostfile=hosts",
            "--mpirun_ccl=2",
            "--main_process_port=1234",
            "s.py",
            "x",
            PATH="",
        )
        assert start["command"][:7] == ["mpirun", "-f", "hosts", "-n", "4", "-ppn", "2"], (
            "without an MPI: as Intel MPI takes it"
        )
        assert "no mpirun is on PATH" in start["notes"][-1] and start["command"][-3:] == ["script", "s.py", "x"]
        expected = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234", "CCL_WORKER_COUNT": "2", "KMP_BLOCKTIME": "1"}
        assert {name: start["environment"][name] for name in expected} == expected

    @pytest.mark.parametrize(
        ("says", "program", "words"),
        [
            ("mpirun (Open MPI) 4.1.4", "mpirun", ["--map-by", "ppr:2:node"]),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2021.11\nHYDRA",
                "mpirun",
                ["-genv", "I_MPI_PIN_DOMAIN", "omp"],
            ),
            ("HYDRA build details:\n    Version: 4.0.2", "mpirun", ["-ppn", "2"]),
            ("Version: mvapich2-2.3.7", "mpirun_rsh", ["-hostfile", "hosts"]),
        ],
    )
    def test_each_mpi_gets_its_own_options(self, shell, dry, says, program, words) -> None:
        shell.write("hosts", "localhost\n")
        shell.write(f"bin/{program}", f"#!/bin/sh\nprintf '{says}\\n'\n").chmod(0o755)
        (start,) = dry(
            "--cpu",
            "--num_processes=2",
            "--mpirun_hostfile=hosts",
            "s.py",
            PATH=str(shell.folder / "bin") + ":/usr/bin:/bin"
            if program == "mpirun"
            else str(shell.folder / "bin") + ":/nowhere",
        )
        assert start["command"][0] == program
        position = start["command"].index(words[0])
        assert any(start["command"][i : i + len(words)] == words for i in range(position, len(start["command"])))

    def test_a_hostfile_that_does_not_exist_yet(self, shell, dry) -> None:
        """It is needed where mpirun starts, which may be another machine than the one that reads the settings."""
        words = ["--cpu", "--num_processes=4", "--num_machines=2", "--mpirun_hostfile=none", "s.py"]
        (start,) = dry(*words, PATH="")
        assert start["command"][:7] == ["mpirun", "-f", "none", "-n", "4", "-ppn", "2"]
        assert any("none does not exist yet" in note for note in start["notes"])
        result = shell.call("launch", *words)
        assert result.returncode == 2 and "--mpirun_hostfile none" in result.stderr

    def test_the_hostfile_lists_too_few(self, shell) -> None:
        shell.write("s.py", "")
        shell.write("hosts", "node0\nnode1\n")
        result = shell.call(
            "launch", "--cpu", "--num_processes=6", "--num_machines=3", "--mpirun_hostfile=hosts", "--dry-run", "s.py"
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert "--num_machines 3, but the hostfile lists 2: node0, node1 (--mpirun_hostfile hosts)." in result.stderr

    def test_options_of_the_agent_are_noted(self, shell) -> None:
        shell.write("s.py", "")
        shell.write("hosts", "localhost\n")
        result = shell.call(
            "launch", "--cpu", "--num_processes=2", "--mpirun_hostfile=hosts", "--log_dir=logs", "--dry-run", "s.py"
        )
        assert result.returncode == 0
        assert "--log_dir logs has no effect on ranks that mpirun starts" in result.stderr

    def test_without_mpirun(self, shell) -> None:
        shell.write("s.py", "")
        shell.write("hosts", "localhost\n")
        result = shell.call("launch", "--cpu", "--num_processes=2", "--mpirun_hostfile=hosts", "s.py", PATH="")
        assert result.returncode == 2 and "needs mpirun, but no mpirun of Open MPI" in result.stderr

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "lists no machine"),
            ("a b c : d\n", "hosts, line 1: 'a b c : d' is not a machine"),
            ("a slots=1\nb slots=many\n", "hosts, line 2: 'b slots=many' is not a machine. Allowed: HOST,"),
            (None, "cannot be read: No such file"),
        ],
    )
    def test_an_invalid_hostfile(self, shell, text, says) -> None:
        shell.write("s.py", "")
        if text is not None:
            shell.write("hosts", text)
        result = shell.call("launch", "--cpu", "--num_processes=2", "--mpirun_hostfile=hosts", "s.py")
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1


class TestDeepSpeed:
    """DeepSpeed's own launchers; deepspeed need not be installed to be shown."""

    @pytest.fixture
    def deepspeed(self, shell, dry):
        shell.write("hosts", "w0 slots=4\nw1 slots=4\n")

        def run(*words: str) -> list[dict]:
            return dry("--use_deepspeed", "--deepspeed_hostfile=hosts", *words, "s.py", "x")

        return run

    @pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"])
    def test_each_launcher(self, deepspeed, launcher) -> None:
        runner, first, second = deepspeed(
            f"--deepspeed_multinode_launcher={launcher}", "--zero_stage=2", "--main_process_ip=10.0.0.1"
        )
        text = " ".join(runner["command"])
        assert (
            "-m deepspeed.launcher.runner --no_local_rank --hostfile hosts --num_nodes 2 --master_addr 10.0.0.1 "
            f"--master_port 29500 --launcher {launcher} " in text
        )
        assert runner["command"][-4:-1] == ["script", "encoded", "s.py"] and decode(runner["command"][-1]) == ["x"]
        assert runner["environment"]["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
        assert [rank["RANK"] for start in (first, second) for rank in start["ranks"]] == [
            str(rank) for rank in range(8)
        ]

    def test_filters(self, deepspeed) -> None:
        runner, first, second = deepspeed("--deepspeed_inclusion_filter=w1:0,2@w0:3")
        assert "--include w1:0,2@w0:3" in " ".join(runner["command"]) and "--num_nodes" not in runner["command"]
        assert [len(start["ranks"]) for start in (first, second)] == [1, 2] and first["machine"] == "w0 (node 0 of 2)"
        runner, only = deepspeed("--deepspeed_exclusion_filter=w0@w1:1")
        assert "--exclude w0@w1:1" in " ".join(runner["command"]) and only["notes"] == ["slots 0, 2, 3 of the hostfile"]

    def test_without_ssh(self, deepspeed) -> None:
        runner, *_ = deepspeed(
            "--deepspeed_multinode_launcher=nossh", "--num_machines=2", "--machine_rank=1", "--num_processes=4"
        )
        assert "--num_nodes 2 --num_gpus 2 --master_addr w0 --master_port 29500 --no_ssh --node_rank 1" in " ".join(
            runner["command"]
        )

    def test_standard_uses_torchs_agent(self, dry) -> None:
        words = ("--use_deepspeed", "--num_machines=2", "--machine_rank=0", "--main_process_ip=h", "--num_processes=2")
        assert len(dry(*words, "--deepspeed_multinode_launcher=standard", "s.py")) == 2

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--deepspeed_inclusion_filter=w2"], "'w2' is not in the hostfile. Its hosts: w0, w1"),
            (["--deepspeed_exclusion_filter=w1:7"], "w1 has no slot 7. Its slots: 0, 1, 2, 3"),
            (["--deepspeed_exclusion_filter=w1:a"], "'w1:a' is not HOST or HOST:SLOT"),
            (["--deepspeed_exclusion_filter=w0@w1"], "leaves no slots"),
            (["--deepspeed_inclusion_filter=w1", "--num_processes=5"], "the filters leave 4 slots"),
            (["--num_machines=3"], "the hostfile lists 2: w0, w1"),
            (["--num_processes=3"], "cannot be divided evenly over 2 machines"),
            (["--num_processes=16"], "8 on each machine, but w0 has 4 slots"),
            (["--deepspeed_multinode_launcher=nossh"], "needs --machine_rank on every machine"),
        ],
    )
    def test_hosts_missing_from_the_hostfile(self, shell, words, says) -> None:
        shell.write("s.py", "")
        shell.write("hosts", "w0 slots=4\nw1 slots=4\n")
        result = shell.call("launch", "--dry_run", "--use_deepspeed", "--deepspeed_hostfile=hosts", *words, "s.py")
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr

    @pytest.mark.parametrize(("hosts", "says"), [(None, "need a hostfile"), ("w0\n", "w0 has no slots")])
    def test_the_hostfile_is_missing(self, shell, hosts, says) -> None:
        shell.write("s.py", "")
        words = [f"--deepspeed_hostfile={shell.write('hosts', hosts)}"] if hosts else ["--num_machines=2"]
        result = shell.call("launch", "--dry_run", "--use_deepspeed", *words, "s.py")
        assert result.returncode == 2 and says in result.stderr, result.stderr


class TestCloud:
    SAGEMAKER = (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nec2_instance_type: ml.p3.16xlarge\n"
        "iam_role_name: role\nnum_machines: 2\n"
    )

    def test_sagemaker(self, shell, dry) -> None:
        shell.write(
            "c.yaml",
            self.SAGEMAKER + "mixed_precision: fp16\nregion: eu-west-1\nadditional_args: {use_spot_instances: true}\n",
        )
        secret = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "topsecret"}
        (start,) = dry("--config_file=c.yaml", "s.py", "--lr", "0.1", "--flag=True", **secret)
        assert start["machine"] == "2 x ml.p3.16xlarge of SageMaker, in eu-west-1"
        assert start["command"] == ["python", "s.py", "--lr", "0.1", "--flag", "True"]
        assert (
            start["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
            and start["environment"]["ACCELERATE_USE_SAGEMAKER"] == "true"
        )
        assert "use_spot_instances: True" in start["notes"] and "topsecret" not in json.dumps(start)

    @pytest.mark.parametrize(
        ("config", "words", "says"),
        [
            ("", ["s.py", "--flag"], "argument --flag of the script has no value. SageMaker does not support flags"),
            ("", ["s.py", "x"], "argument 'x' of the script has no name"),
            ("", ["s.py", "--a=1", "--a", "2"], "argument --a of the script is repeated"),
            ("iam_role_name: null\n", ["s.py"], "a SageMaker job needs iam_role_name"),
            ("", ["--no_python", "/bin/true"], "SageMaker runs a Python script"),
            ("sagemaker_inputs_file: none.tsv\n", ["s.py"], "'none.tsv' cannot be read"),
            ("sagemaker_metrics_file: bad.tsv\n", ["s.py"], "bad.tsv, line 2: 'loss' is not a name and a value"),
        ],
    )
    def test_options_that_sagemaker_does_not_support(self, shell, config, words, says) -> None:
        shell.write("s.py", "")
        shell.write("bad.tsv", "name\tregex\nloss\n")
        text = self.SAGEMAKER.replace("iam_role_name: role\n", "") if "iam_role" in config else self.SAGEMAKER
        shell.write("c.yaml", text + config)
        result = shell.call("launch", "--dry_run", "--config_file=c.yaml", *words)
        assert result.returncode == 2 and says in result.stderr, result.stderr

    def test_tpu(self, shell, dry) -> None:
        (start,) = dry("--tpu", "--mixed_precision=bf16", "--main_training_function=train", "s.py", "x")
        assert start["environment"] == {"ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "TPU", "XLA_USE_BF16": "1"}
        assert "a process for each chip" in start["notes"][0] and "train()" in start["notes"][0]
        (start,) = dry("--tpu", "--mixed_precision=bf16", "--downcast_bf16", "s.py")
        assert start["environment"]["XLA_DOWNCAST_BF16"] == "1"

    def test_tpu_pod(self, shell, dry) -> None:
        words = (
            "--tpu",
            "--tpu_cluster",
            "--tpu_use_sudo",
            "--tpu_name=pod",
            "--tpu_zone=z",
            "--env=A=b c",
            "s.py",
            "--lr",
            "0.1",
        )
        (start,) = dry(*words)
        gcloud = start["command"]
        assert gcloud[:8] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "z"] and gcloud[-2:] == [
            "--worker",
            "all",
        ]
        line = gcloud[gcloud.index("--command") + 1]
        assert line.startswith(f"cd {shell.folder} && sudo env ") and "'A=b c'" in line
        assert "accel launch" in line and line.endswith(
            "--tpu=true --tpu_cluster=false --main_training_function=main s.py --lr 0.1"
        )
        starts = dry("--tpu", "--tpu_cluster", "--vm=m0", "--vm=m1", "--tpu_zone=z", "s.py")
        assert [start["command"][3] for start in starts] == ["m0", "m1"]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--tpu", "--tpu_cluster", "s.py"], "--tpu_name and --tpu_zone must be given"),
            (["--tpu", "--tpu_cluster", "--tpu_name=p", "--tpu_zone=z", "--env=AB", "s.py"], "--env 'AB' is not"),
            (["--tpu", "--no_python", "/bin/true"], "--no_python and --tpu contradict each other"),
        ],
    )
    def test_tpu_requirements(self, shell, words, says) -> None:
        shell.write("s.py", "")
        result = shell.call("launch", "--dry_run", *words)
        assert result.returncode == 2 and says in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cpu", "--num_processes=2", "--mpirun_hostfile=none"], "--mpirun_hostfile none"),
        (["--multi_gpu", "--num_machines=2", "--machine_rank=3", "--main_process_ip=h"], "--machine_rank 3"),
        (
            ["--gpu_ids=0", "--num_machines=2", "--machine_rank=0", "--main_process_ip=h", "--num_processes=3"],
            "--num_processes 3",
        ),
        (["--as-accelerate", "--cpu", "--multi_gpu"], "--multi_gpu"),
        (["--use_deepspeed", "--deepspeed_hostfile=hosts", "--deepspeed_multinode_launcher=nossh"], "--machine_rank"),
        (["--cpu", "--ft", "--tee=1"], "--tee"),
        (["--cpu", "--ft", "--local-ranks-filter=0"], "local_ranks_filter 0"),
        (["--cpu", "--ft", "--num_machines=2", "--machine_rank=0", "--main_process_ip=no.such.host."], "no.such.host."),
        (["--config_file=sagemaker.yaml", "--aws_access_key_id=AKIA"], "--aws_secret_access_key"),
    ],
)
def test_arguments_are_checked_before_the_machine(shell, monkeypatch, words, says) -> None:
    """A user mends the command line first: no GPU, no program and no package is asked for before it is right."""
    for module in ("accel_compat", "deepspeed", "sagemaker", "torchft"):
        monkeypatch.setitem(sys.modules, module, None)
    shell.write("s.py", "")
    shell.write("hosts", "w0 slots=4\nw1 slots=4\n")
    shell.write(
        "sagemaker.yaml",
        "compute_environment: AMAZON_SAGEMAKER\niam_role_name: role\nec2_instance_type: ml.p3.2xlarge\n",
    )
    result = shell.call("launch", *words, "s.py", PATH="")
    assert result.returncode == 2 and says in result.stderr
    assert not any(word in result.stderr for word in ("not installed", "pip install", "GPU"))
