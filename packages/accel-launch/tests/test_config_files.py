"""Configuration files of this version of the format and of older ones: read, updated and shown."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_launch.config.read import load_settings
from accel_launch.config.update import update_file
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, load_groups

LOCAL = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmain_training_function: main\nnum_machines: 1\n"

# Name: the file, the settings that it stands for, and the variables that a process gets. accel-state's tests read each
# key by itself; these files have what depends on several keys, or is written in another form than it is read.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "megatron": (
        LOCAL + "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_num_micro_batches: 2\n"
        "  megatron_lm_tp_degree: 2\n  megatron_lm_use_distributed_optimizer: true\nnum_processes: 4\n",
        {"use_megatron_lm": True, "megatron_lm_tp_degree": 2},
        {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_NO_LOAD_OPTIM": "false"},
    ),
    "sagemaker": (
        "additional_args:\n  enable_network_isolation: True\n  max_wait: 86400\ncompute_environment: AMAZON_SAGEMAKER\n"
        "distributed_type: DATA_PARALLEL\nec2_instance_type: ml.p3.16xlarge\niam_role_name: xxxxx\nimage_uri: null\n"
        "mixed_precision: fp16\nnum_machines: 1\nprofile: xxxxx\npytorch_version: 1.10.2\n",
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "aws_profile": "xxxxx",
            "pytorch_version": "1.10.2",
            "sagemaker_additional_args": {"enable_network_isolation": True, "max_wait": 86400},
        },
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
    ),
    "mpirun": (
        "distributed_type: MULTI_CPU\nipex_config:\n  ipex: true\nmain_process_ip: 36.112.23.24\nmpirun_config:\n"
        "  mpirun_ccl: '1'\n  mpirun_hostfile: /data/hostfile\nnum_machines: 4\nnum_processes: 16\n",
        {"mpirun_hostfile": "/data/hostfile", "mpirun_ccl": 1, "num_machines": 4, "cpu": True},
        {"CCL_WORKER_COUNT": "1", "ACCELERATE_USE_CPU": "true"},
    ),
    "fp8 with Transformer Engine": (
        "mixed_precision: fp8\nfp8_config:\n  amax_compute_algorithm: max\n  backend: TE\n"
        "  override_linear_precision: false\n",
        {"fp8_backend": "te", "fp8_amax_compute_algo": "max", "fp8_override_linear_precision": (False, False, False)},
        {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"},
    ),
    "mesh": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 4\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n",
        {"use_fsdp": True, "use_parallelism_config": True, "parallelism_config_tp_size": 2},
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
    ),
    "tpu pod": (
        LOCAL + "distributed_type: TPU\ndowncast_bf16: 'yes'\nmixed_precision: bf16\nnum_processes: 8\ntpu_name: "
        "pod\ntpu_zone: zone-a\n"
        "tpu_use_cluster: true\ntpu_use_sudo: false\ntpu_env: [A=1, B=2]\ntpu_vm: [one, two]\ncommand_file: "
        "null\ncommands: [echo hello]\n",
        {
            "tpu": True,
            "distributed_type": "XLA",
            "tpu_cluster": True,
            "env": ("A=1", "B=2"),
            "vm": ("one", "two"),
            "command": ("echo hello",),
        },
        {"ACCELERATE_DOWNCAST_BF16": "true"},
    ),
    "before 0.6": (
        "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\n",
        {"mixed_precision": "fp16"},
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
    ),
    "0.11 with FSDP": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  min_num_params: 2000\n  offload_params: false\n  "
        "sharding_strategy: 1\nnum_processes: 2\n",
        {"fsdp_min_num_params": 2000, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
        {"FSDP_MIN_NUM_PARAMS": "2000", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
    ),
    "0.12 with all of DeepSpeed": (
        LOCAL + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  "
        "deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 2\n"
        "  offload_optimizer_device: nvme\n  offload_param_nvme_path: /nvme\n  zero_stage: 3\nnum_processes: 2\n",
        {"use_deepspeed": True, "offload_param_nvme_path": "/nvme", "gradient_accumulation_steps": 2},
        {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
    ),
    "0.13": (
        LOCAL + "distributed_type: MPS\ndynamo_backend: 'NO'\ngpu_ids: null\nnum_processes: 1\nuse_mps_device: true\n",
        {"dynamo_backend": "NO", "distributed_type": "NO"},
        {"ACCELERATE_DYNAMO_BACKEND": "NO"},
    ),
    "0.16 with sections that are empty": (
        LOCAL + "command_file: null\ndeepspeed_config: {}\ndistributed_type: MULTI_GPU\ndynamo_config: {}\n"
        "fp8_config: {}\nfsdp_config: {}\ngpu_ids: 0\nmegatron_lm_config: {}\nmpirun_config: {}\n"
        "parallelism_config: {}\ntpu_env: []\ntpu_vm: null\nuse_cpu: 'no'\n",
        {"gpu_ids": "0", "use_fsdp": False, "use_parallelism_config": False, "use_megatron_lm": False, "cpu": False},
        {},
    ),
    "1.5 with tensor parallelism": (
        LOCAL + "distributed_type: TP\nnum_processes: 2\ntp_config:\n  tp_size: 2\n",
        {"use_parallelism_config": True, "parallelism_config_tp_size": 2, "distributed_type": "MULTI_GPU"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
    ),
    "1.6 with FSDP 1 and the strategy under the key of FSDP 2": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  "
        "fsdp_reshard_after_forward: SHARD_GRAD_OP\n  fsdp_version: 1\nnum_processes: 2\n",
        {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_version": 1, "fsdp_reshard_after_forward": True},
        {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
    ),
    "1.15 on Neuron": (
        LOCAL + "distributed_type: MULTI_NEURON\ndynamo_config:\n  dynamo_backend: NEURON\n"
        "  dynamo_use_regional_compilation: true\nnum_processes: 8\n",
        {"distributed_type": "MULTI_NEURON", "dynamo_backend": "NEURON", "dynamo_use_regional_compilation": True},
        {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
    ),
}
ALL = pytest.mark.parametrize("name", CONFIGS)
SUFFIX = pytest.mark.parametrize("suffix", [".yaml", ".json"])


def write(folder: Path, text: str, suffix: str = ".yaml") -> Path:
    path = folder / f"config{suffix}"
    text = textwrap.dedent(text)
    path.write_text(json.dumps(yaml.safe_load(text)) if suffix == ".json" else text)
    return path


def load(path: Path, **options: str) -> Resolution:
    return load_settings({"config_file": str(path), **options}, environ={})


def values(settings: Resolution) -> dict[str, Any]:
    return {
        name: setting.value
        for name, setting in settings.settings.items()
        if not setting.option.retired and name != "config_file"
    }


@ALL
@SUFFIX
def test_it_loads_and_an_update_changes_no_setting(tmp_path: Path, name: str, suffix: str) -> None:
    text, expected, variables = CONFIGS[name]
    path = write(tmp_path, text, suffix)
    before = load(path)
    assert {key: before[key] for key in expected} == expected
    assert variables.items() <= before.environment().items()
    update_file(path, path)
    after = load(path)
    assert values(after) == values(before)
    assert not after.notes(), "today's keys only"
    assert {
        key: text for key, text in before.environment().items() if text != "false"
    }.items() <= after.environment().items()
    update_file(path, path)
    assert values(load(path)) == values(before)
    assert not list(tmp_path.glob(".config*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_proceses: 2", "num_proceses is not a known key. Did you mean num_processes? Its value is 2. Known:"),
        ("zero_stage: 2", "zero_stage is not a known key. Did you mean deepspeed_config.zero_stage?"),
        ("tpu_cluster2: 2", "Did you mean tpu_cluster?"),
        ("fsdp_config: {zero_stage: 2}", "Did you mean deepspeed_config.zero_stage?"),
        ("dynamo_config: {backend: INDUCTOR}", "Did you mean dynamo_config.dynamo_backend?"),
        ("fsdp_config: {fsdp_versoin: 2}", "Did you mean fsdp_config.fsdp_version? Its value is 2. Known:"),
        ("fsdp_config: 2", "fsdp_config must be a mapping of keys to values, not 2"),
        ("tp_config: 2", "tp_config must be a mapping of keys to values, not 2"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, f"debug: false\n{text}\n")
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert message.format(path=path) in str(caught.value) and f"{path}, line " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION"),
        ("ACCEL_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_GRADIENT_ACCUMULATION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("FSDP_SHARDING_STRATGY", "FSDP_SHARDING_STRATEGY"),
        ("MEGATRON_LM_TP_DEGRE", "MEGATRON_LM_TP_DEGREE"),
    ],
)
def test_a_misspelt_variable_gets_a_note(tmp_path: Path, name: str, meant: str) -> None:
    # Values are not shown: they may be secret.
    notes = load_settings({}, {name: "bf16", "HF_HOME": str(tmp_path)}).notes()
    assert notes == (f"environment variable {name} has no effect. Did you mean {meant}?",)


def test_variables_of_options_and_of_other_libraries_get_no_note(tmp_path: Path) -> None:
    names = {option.env for group in load_groups() for option in group.options()}
    others = """ACCELERATE_ALLOW_CP_STANDALONE ACCELERATE_BYPASS_DEVICE_MAP ACCELERATE_CONFIG_DS_FIELDS
        ACCELERATE_DEBUG_RDV_FILE ACCELERATE_ENABLE_RICH ACCELERATE_FT_DIRECTORY ACCELERATE_FT_HOST
        ACCELERATE_FT_REPLICA ACCELERATE_FT_RESTARTS ACCELERATE_INIT_INCLUDE_BUFFERS ACCELERATE_LOG_LEVEL
        ACCELERATE_RUN_TOKEN ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE ACCELERATE_TORCH_DEVICE ACCELERATE_USE_SAGEMAKER
        ACCEL_LAUNCH_RELAY ACCEL_RANK_OWNER FSDP_PYTORCH_VERSION""".split()
    # Empty variables count as not set.
    environ = {**dict.fromkeys(filter(None, names), ""), **dict.fromkeys(others, "1"), "HF_HOME": str(tmp_path)}
    assert load_settings({}, environ).notes() == ()


def test_a_variable_that_replaces_another_value_of_the_file_gets_a_note(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: fp16\nnum_processes: 2\n")
    variables = {"HF_HOME": str(tmp_path), "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_NUM_PROCESSES": "2"}
    settings = load_settings({"config_file": str(path)}, variables)
    assert settings["mixed_precision"] == "bf16"
    assert settings.notes() == (f"ACCELERATE_MIXED_PRECISION=bf16 overrides mixed_precision: fp16 in {path}, line 1",)
    given = load_settings({"config_file": str(path), "mixed_precision": "no"}, variables)
    assert given["mixed_precision"] == "no" and given.notes() == ()
