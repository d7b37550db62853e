"""Every configuration file that the documentation of the format shows, and files of its older versions: read, handed
over, updated.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_launch.accelerators.registry import find_visible
from accel_launch.cli import main
from accel_launch.config.read import load_settings
from accel_launch.config.update import update_file
from accel_state.env import all_variables
from accel_state.errors import ConfigurationError
from accel_state.options import Resolution, check_deepspeed_file

LOCAL = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmain_training_function: main\nnum_machines: 1\n"

# Name: the file, the settings that it stands for, and the variables that a process gets.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "two GPUs": (
        """
        compute_environment: LOCAL_MACHINE
        deepspeed_config: {}
        distributed_type: MULTI_GPU
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        mixed_precision: fp16
        num_machines: 1
        num_processes: 2
        use_cpu: false
        """,
        {
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "fp16",
            "num_processes": 2,
            "cpu": False,
            "main_process_ip": None,
        },
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
    ),
    "fsdp": (
        """
        compute_environment: LOCAL_MACHINE
        debug: false
        distributed_type: FSDP
        downcast_bf16: 'no'
        fsdp_config:
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_backward_prefetch_policy: BACKWARD_PRE
          fsdp_forward_prefetch: false
          fsdp_cpu_ram_efficient_loading: true
          fsdp_offload_params: false
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_state_dict_type: SHARDED_STATE_DICT
          fsdp_sync_module_states: true
          fsdp_transformer_layer_cls_to_wrap: BertLayer
          fsdp_use_orig_params: true
        machine_rank: 0
        main_training_function: main
        mixed_precision: bf16
        num_machines: 1
        num_processes: 2
        rdzv_backend: static
        same_network: true
        tpu_env: []
        tpu_use_cluster: false
        tpu_use_sudo: false
        use_cpu: false
        """,
        {
            "use_fsdp": True,
            "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "same_network": True,
        },
        {
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
            "FSDP_VERSION": "1",
            "FSDP_USE_ORIG_PARAMS": "true",
        },
    ),
    "deepspeed stage 2": (
        """
        compute_environment: LOCAL_MACHINE
        deepspeed_config:
          gradient_accumulation_steps: 1
          gradient_clipping: 1.0
          offload_optimizer_device: none
          offload_param_device: none
          zero3_init_flag: true
          zero_stage: 2
        distributed_type: DEEPSPEED
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        mixed_precision: fp16
        num_machines: 1
        num_processes: 2
        use_cpu: false
        """,
        {
            "use_deepspeed": True,
            "zero_stage": 2,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero3_init_flag": True,
        },
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        },
    ),
    "deepspeed stage 3 with offload": (
        """
        compute_environment: LOCAL_MACHINE
        deepspeed_config:
          gradient_accumulation_steps: 1
          gradient_clipping: 1.0
          offload_optimizer_device: cpu
          offload_param_device: cpu
          zero3_init_flag: true
          zero3_save_16bit_model: true
          zero_stage: 3
        distributed_type: DEEPSPEED
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        mixed_precision: fp16
        num_machines: 1
        num_processes: 2
        use_cpu: false
        """,
        {"zero_stage": 3, "offload_param_device": "cpu", "zero3_save_16bit_model": True},
        {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
    ),
    "deepspeed with a file of its own": (
        """
        compute_environment: LOCAL_MACHINE
        deepspeed_config:
          deepspeed_config_file: /data/configs/zero_stage2_config.json
          zero3_init_flag: true
        distributed_type: DEEPSPEED
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        mixed_precision: fp16
        num_machines: 1
        num_processes: 2
        use_cpu: false
        """,
        {"deepspeed_config_file": "/data/configs/zero_stage2_config.json", "use_deepspeed": True, "zero_stage": None},
        {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "/data/configs/zero_stage2_config.json"},
    ),
    "megatron": (
        """
        compute_environment: LOCAL_MACHINE
        deepspeed_config: {}
        distributed_type: MEGATRON_LM
        downcast_bf16: 'no'
        fsdp_config: {}
        machine_rank: 0
        main_process_ip: null
        main_process_port: null
        main_training_function: main
        megatron_lm_config:
          megatron_lm_gradient_clipping: 1.0
          megatron_lm_num_micro_batches: 2
          megatron_lm_pp_degree: 2
          megatron_lm_recompute_activations: true
          megatron_lm_sequence_parallelism: true
          megatron_lm_tp_degree: 2
          megatron_lm_use_distributed_optimizer: true
        mixed_precision: bf16
        num_machines: 1
        num_processes: 4
        rdzv_backend: static
        same_network: true
        use_cpu: false
        """,
        {
            "use_megatron_lm": True,
            "megatron_lm_tp_degree": 2,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_sequence_parallelism": True,
        },
        {
            "ACCELERATE_USE_MEGATRON_LM": "true",
            "MEGATRON_LM_TP_DEGREE": "2",
            "MEGATRON_LM_NUM_MICRO_BATCHES": "2",
            "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": "true",
            "MEGATRON_LM_NO_LOAD_OPTIM": "false",
        },
    ),
    "sagemaker": (
        """
        base_job_name: accelerate-sagemaker-1
        compute_environment: AMAZON_SAGEMAKER
        distributed_type: DATA_PARALLEL
        ec2_instance_type: ml.p3.16xlarge
        iam_role_name: xxxxx
        image_uri: null
        mixed_precision: fp16
        num_machines: 1
        profile: xxxxx
        py_version: py38
        pytorch_version: 1.10.2
        region: us-east-1
        transformers_version: 4.17.0
        use_cpu: false
        additional_args:
          # enable network isolation to restrict internet access for containers
          enable_network_isolation: True
          use_spot_instances: True
          max_wait: 86400
        """,
        {
            "compute_environment": "AMAZON_SAGEMAKER",
            "ec2_instance_type": "ml.p3.16xlarge",
            "aws_profile": "xxxxx",
            "pytorch_version": "1.10.2",
            "sagemaker_additional_args": {
                "enable_network_isolation": True,
                "use_spot_instances": True,
                "max_wait": 86400,
            },
        },
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
    ),
    "one CPU": (
        """
        compute_environment: LOCAL_MACHINE
        distributed_type: 'NO'
        downcast_bf16: 'no'
        ipex_config:
          ipex: true
        machine_rank: 0
        main_training_function: main
        mixed_precision: bf16
        num_machines: 1
        num_processes: 1
        rdzv_backend: static
        same_network: true
        tpu_env: []
        tpu_use_cluster: false
        tpu_use_sudo: false
        use_cpu: true
        """,
        {"cpu": True, "num_processes": 1, "distributed_type": "NO"},
        {"ACCELERATE_USE_CPU": "true"},
    ),
    "mpirun": (
        """
        compute_environment: LOCAL_MACHINE
        distributed_type: MULTI_CPU
        downcast_bf16: 'no'
        ipex_config:
          ipex: true
        machine_rank: 0
        main_process_ip: 36.112.23.24
        main_process_port: 29500
        main_training_function: main
        mixed_precision: bf16
        mpirun_config:
          mpirun_ccl: '1'
          mpirun_hostfile: /data/hostfile
        num_machines: 4
        num_processes: 16
        rdzv_backend: static
        same_network: true
        tpu_env: []
        tpu_use_cluster: false
        tpu_use_sudo: false
        use_cpu: true
        """,
        {
            "mpirun_hostfile": "/data/hostfile",
            "mpirun_ccl": 1,
            "num_machines": 4,
            "num_processes": 16,
            "main_process_port": 29500,
        },
        {"CCL_WORKER_COUNT": "1", "ACCELERATE_USE_CPU": "true"},
    ),
    "fp8 with Transformer Engine": (
        """
        mixed_precision: fp8
        fp8_config:
          amax_compute_algorithm: max
          amax_history_length: 1024
          backend: TE
          fp8_format: HYBRID
          interval: 1
          margin: 0
          override_linear_precision: false
          use_autocast_during_eval: false
        """,
        {
            "mixed_precision": "fp8",
            "fp8_backend": "te",
            "fp8_amax_compute_algo": "max",
            "fp8_override_linear_precision": (False, False, False),
        },
        {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"},
    ),
    "fp8 with MS-AMP": (
        "mixed_precision: fp8\nfp8_config:\n  backend: MSAMP\n  opt_level: O2\n",
        {"fp8_backend": "msamp", "fp8_opt_level": "O2"},
        {"ACCELERATE_FP8_OPT_LEVEL": "O2"},
    ),
    "debug": ("compute_environment: LOCAL_MACHINE\ndebug: true\n", {"debug": True}, {"ACCELERATE_DEBUG_MODE": "true"}),
    "mesh": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: 8\nparallelism_config:\n"
        "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  "
        "parallelism_config_tp_size: 2\n",
        {"use_parallelism_config": True, "parallelism_config_tp_size": 2},
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_TP_SIZE": "2",
            "PARALLELISM_CONFIG_CP_SIZE": "1",
        },
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
    "0.11": (
        LOCAL
        + "deepspeed_config: {}\ndistributed_type: 'NO'\nfsdp_config: {}\nmain_process_ip: null\nmain_process_port: "
        "null\n"
        "mixed_precision: 'no'\nnum_processes: 1\nuse_cpu: false\n",
        {"mixed_precision": "no", "num_processes": 1},
        {"ACCELERATE_MIXED_PRECISION": "no"},
    ),
    "0.11 with FSDP": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  min_num_params: 2000\n  offload_params: false\n  "
        "sharding_strategy: 1\n"
        "mixed_precision: 'no'\nnum_processes: 2\nuse_cpu: false\n",
        {"fsdp_min_num_params": 2000, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
        {"FSDP_MIN_NUM_PARAMS": "2000", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
    ),
    "0.13": (
        LOCAL
        + "distributed_type: MPS\ndynamo_backend: 'NO'\ndowncast_bf16: 'no'\ngpu_ids: null\nmegatron_lm_config: {}\n"
        "mixed_precision: 'no'\nnum_processes: 1\nrdzv_backend: static\nsame_network: true\nuse_mps_device: "
        "true\nuse_cpu: false\n",
        {"dynamo_backend": "NO", "distributed_type": "NO"},
        {"ACCELERATE_DYNAMO_BACKEND": "NO"},
    ),
    "1.5 with tensor parallelism": (
        LOCAL
        + "distributed_type: TP\nmixed_precision: 'no'\nnum_processes: 2\ntp_config:\n  tp_size: 2\nuse_cpu: false\n",
        {"use_parallelism_config": True, "parallelism_config_tp_size": 2, "distributed_type": "MULTI_GPU"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
    ),
    "before 0.6": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\nmachine_rank: 0\nnum_machines: "
        "1\nnum_processes: 2\n",
        {"mixed_precision": "fp16"},
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
    ),
    "1.6 with FSDP 1 and the strategy under the key of FSDP 2": (
        LOCAL + "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  "
        "fsdp_reshard_after_forward: SHARD_GRAD_OP\n  fsdp_version: 1\nnum_processes: 2\n",
        {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_version": 1, "fsdp_reshard_after_forward": True},
        {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
    ),
    "1.6 with FSDP 2": (
        LOCAL
        + "distributed_type: FSDP\nenable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_ignored_modules: lm_head|.*router\n"
        "  fsdp_offload_params: false\n  fsdp_reshard_after_forward: false\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: null\n"
        "  fsdp_version: 2\nnum_processes: 2\n",
        {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_ignored_modules": "lm_head|.*router"},
        {"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_IGNORED_MODULES": "lm_head|.*router"},
    ),
    "0.12 with all of DeepSpeed": (
        LOCAL + "distributed_type: DEEPSPEED\ndeepspeed_config:\n  "
        "deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 2\n"
        "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /nvme\n  offload_param_device: nvme\n"
        "  offload_param_nvme_path: /nvme\n  zero3_init_flag: true\n  zero_stage: 3\nnum_processes: 2\n",
        {
            "deepspeed_multinode_launcher": "standard",
            "offload_param_nvme_path": "/nvme",
            "gradient_accumulation_steps": 2,
        },
        {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
    ),
    "0.16 with sections that are empty": (
        LOCAL + "command_file: null\ncommands: null\ndeepspeed_config: {}\ndistributed_type: MULTI_GPU\n"
        "downcast_bf16: 'no'\ndynamo_config: {}\nfp8_config: {}\nfsdp_config: {}\ngpu_ids: 0\nipex_config: {}\n"
        "megatron_lm_config: {}\nmpirun_config: {}\nparallelism_config: {}\ntpu_env: []\ntpu_vm: null\nuse_cpu: 'no'\n",
        {"gpu_ids": "0", "use_fsdp": False, "use_parallelism_config": False, "use_megatron_lm": False, "cpu": False},
        {},
    ),
    "1.12 with sequence parallelism": (
        LOCAL + "deepspeed_config:\n  zero_stage: 3\ndistributed_type: DEEPSPEED\nnum_processes: 4\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_sp_backend: deepspeed\n"
        "  parallelism_config_sp_seq_length: null\n  parallelism_config_sp_seq_length_is_variable: true\n"
        "  parallelism_config_sp_size: 2\nuse_parallelism_config: true\n",
        {"use_deepspeed": True, "parallelism_config_sp_size": 2, "use_parallelism_config": True},
        {"PARALLELISM_CONFIG_SP_SIZE": "2"},
    ),
    "1.15 on Neuron": (
        LOCAL + "distributed_type: MULTI_NEURON\ndynamo_config:\n  dynamo_backend: NEURON\n  dynamo_mode: default\n  "
        "dynamo_use_dynamic: false\n  dynamo_use_fullgraph: false\n  dynamo_use_regional_compilation: true\n"
        "mixed_precision: bf16\nnum_processes: 8\n",
        {"distributed_type": "MULTI_NEURON", "dynamo_backend": "NEURON", "dynamo_use_regional_compilation": True},
        {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
    ),
    "0.20": (
        LOCAL + "command_file: null\ncommands: null\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: reduce-overhead\n  dynamo_use_dynamic: false\n"
        "  dynamo_use_fullgraph: false\n"
        "gpu_ids: 0,1\nmixed_precision: bf16\nnum_processes: 2\nrdzv_backend: c10d\ntpu_env: []\ntpu_name: null\n"
        "tpu_zone: null\nuse_cpu: false\n",
        {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead", "gpu_ids": "0,1", "rdzv_backend": "c10d"},
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false"},
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
def test_it_loads(tmp_path: Path, name: str, suffix: str) -> None:
    text, expected, variables = CONFIGS[name]
    settings = load(write(tmp_path, text, suffix))
    assert {key: settings[key] for key in expected} == expected
    environment = settings.environment()
    assert variables.items() <= environment.items()
    others = {
        "FSDP_": "use_fsdp",
        "MEGATRON_LM_": "use_megatron_lm",
        "PARALLELISM_": "use_parallelism_config",
        "ACCELERATE_DEEPSPEED": "use_deepspeed",
    }
    for prefix, switch in others.items():
        assert settings[switch] or not [key for key in environment if key.startswith(prefix)]


@ALL
@SUFFIX
def test_update_changes_no_setting(tmp_path: Path, name: str, suffix: str) -> None:
    path = write(tmp_path, CONFIGS[name][0], suffix)
    before = load(path)
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


@ALL
def test_show_has_every_setting_and_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, expected, _ = CONFIGS[name]
    path = write(tmp_path, text)
    assert main(["config", "show", "--config_file", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shown = report["settings"]
    assert {key: shown[key]["value"] for key in expected} == json.loads(json.dumps(expected))
    assert shown["config_file"]["where"] == f"--config_file {path}"
    lines = path.read_text().splitlines()
    for setting in shown.values():
        if setting["source"] == "config file":
            place, _, number = setting["where"].rpartition(", line ")
            key = place.removesuffix(f" in {path}").split(":")[0].split(".")[-1]
            assert place.endswith(f" in {path}")
            assert key in lines[int(number) - 1] or any(f", line {number}: " in note for note in report["notes"])


@ALL
def test_dry_run_passes_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, _, variables = CONFIGS[name]
    if "gpu_ids: 0" in text and not find_visible(all_variables()).count:
        pytest.skip("gpu_ids asks for GPUs, and this machine has none")
    if "mpirun" in text and shutil.which("mpirun") is None:
        pytest.skip("there is no MPI here")
    monkeypatch.chdir(tmp_path)
    Path("hostfile").write_text("one\ntwo\nthree\nfour\n")
    path = write(tmp_path, text.replace("/data/hostfile", str(tmp_path / "hostfile")))
    Path("s.py").write_text("raise SystemExit('a dry run starts nothing')")
    assert main(["launch", "--dry_run", "--json", "--config_file", str(path), "s.py"]) == 0
    starts = json.loads(capsys.readouterr().out)
    assert starts
    for start in starts:
        wire = " ".join([*start["command"], *(f"{key}={value}" for key, value in start["environment"].items())])
        missing = [f"{key}={value}" for key, value in variables.items() if f"{key}={value}" not in wire]
        assert not missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "num_proceses: 2",
            "num_proceses is not a known key. Did you mean num_processes? Its value is 2. Known: activation_",
        ),
        ("zero_stage: 2", "zero_stage is not a known key. Did you mean deepspeed_config.zero_stage?"),
        ("tpu_cluster2: 2", "Did you mean tpu_cluster?"),
        (
            "fsdp_config: {zero_stage: 2}",
            "fsdp_config.zero_stage is not a known key. Did you mean deepspeed_config.zero_stage?",
        ),
        (
            "dynamo_config: {backend: INDUCTOR}",
            "backend is not a known key. Did you mean dynamo_config.dynamo_backend?",
        ),
        (
            "fsdp_config: {fsdp_versoin: 2}",
            "Did you mean fsdp_config.fsdp_version? Its value is 2. Known: fsdp_config.",
        ),
        ("fsdp_config: 2", "fsdp_config must be a mapping of keys to values, not 2"),
        ("tp_config: 2", "tp_config must be a mapping of keys to values, not 2"),
        ("num_processes: [2]", "num_processes in {path}, line 2: [2] is not an integer of at least 1"),
        ("fsdp_config: {fsdp_version: 3}", "fsdp_config.fsdp_version in {path}, line 2: '3' is not one of 1, 2"),
        ("machine_rank: 1", "machine_rank: 1 in {path}, line 2: with 1 machine(s), ranks are 0 to 0"),
        (
            "mixed_precision: bf16\nfp16: true",
            "{path}, line 3: fp16=True contradicts mixed_precision='bf16' in {path}, line 2",
        ),
        (
            "distributed_type: FSDP\nuse_deepspeed: true",
            "use_deepspeed: true in {path}, line 3 and distributed_type: FSDP in {path}, line 2",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, f"debug: false\n{text}\n")
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert message.format(path=path) in str(caught.value) and f"{path}, line " in str(caught.value)


SCENARIO_1 = """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: 'cpu'
  offload_param_device: 'cpu'
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
  deepspeed_config_file: 'ds_config.json'
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
"""
SCENARIO_2 = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
machine_rank: 0
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""
FIXED = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
    "steps_per_print": 2000000,
}
OPEN = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000000,
}
SCENARIO_3_FLAGS = {
    "mixed_precision": "fp16",
    "zero_stage": "3",
    "gradient_accumulation_steps": "5",
    "gradient_clipping": "1.0",
    "offload_param_device": "cpu",
    "offload_optimizer_device": "nvme",
    "zero3_save_16bit_model": "true",
}


class TestDeepSpeedScenarios:
    @pytest.fixture(autouse=True)
    def _in_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def check(self, text: str, content: Any, **options: str) -> Resolution:
        Path("ds_config.json").write_text(json.dumps(content))
        settings = load(write(Path.cwd(), text), **options)
        check_deepspeed_file(settings)
        return settings

    def test_1_conflicting_settings_are_listed(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            self.check(SCENARIO_1, FIXED)
        message = str(caught.value)
        assert message.startswith(
            "When using `deepspeed_config_file`, the following accel config variables will be ignored: "
            "['gradient_accumulation_steps', "
            "'gradient_clipping', 'zero_stage', 'offload_optimizer_device', 'offload_param_device', "
            "'zero3_save_16bit_model', "
            "'mixed_precision']. Please specify them appropriately in the DeepSpeed config file."
        )
        assert (
            "deepspeed_config.zero_stage: 3 in" in message
            and "line 12, ds_config.json has zero_optimization.stage: 3" in message
        )
        assert "mixed_precision (not set), ds_config.json enables bf16" in message

    def test_2_deepspeed_file_is_passed_on(self) -> None:
        environment = self.check(SCENARIO_2, FIXED).environment()
        assert environment == {
            "ACCELERATE_USE_CPU": "false",
            "ACCELERATE_DYNAMO_BACKEND": "NO",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_config.json",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            "ACCELERATE_DOWNCAST_BF16": "false",
        }

    def test_3_auto_is_filled_in_from_the_command_line(self) -> None:
        environment = self.check(SCENARIO_2, OPEN, **SCENARIO_3_FLAGS).environment()
        assert (
            environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
            and environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        )
        assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"
        assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "nvme"
