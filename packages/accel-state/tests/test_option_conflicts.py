"""Settings that contradict one another, that follow from one another, or that another version of the format called
differently.
"""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import ConfigurationError
from accel_state.options import (
    ConfigFile,
    Resolution,
    Source,
    check,
    check_deepspeed_file,
    load_groups,
    migrate,
    resolve,
)
from accel_state.options.conflicts import ENGINES
from accel_state.options.fsdp_versions import UNSUPPORTED

GROUPS = load_groups()


def settle(
    tmp_path: Path | None = None, text: str = "", environ: dict[str, str] | None = None, **options: Any
) -> Resolution:
    """Settings of a file, of variables and of a command line, settled."""
    config = None
    if text:
        assert tmp_path is not None
        path = tmp_path / "c.yaml"
        path.write_text(text)
        config = migrate(ConfigFile.read(path), GROUPS)
    return check(resolve(GROUPS, options, environ or {}, config))


class TestEngines:
    @pytest.mark.parametrize(("switch", "kind"), ENGINES.items())
    def test_switch_and_kind_agree(self, tmp_path: Path, switch: str, kind: str) -> None:
        by_switch, by_kind = settle(**{switch: "true"}), settle(tmp_path, f"distributed_type: {kind}")
        for settings in (by_switch, by_kind):
            assert settings[switch] is True and settings["distributed_type"] == kind
            assert [name for name in ENGINES if settings[name]] == [switch]
        assert by_kind.where(switch).startswith(f"distributed_type: {kind} in ")
        assert by_switch.where("distributed_type") == f"--{switch}"

    @pytest.mark.parametrize(("strong", "weak"), list(itertools.permutations(ENGINES, 2)))
    def test_the_stronger_engine_counts(self, tmp_path: Path, strong: str, weak: str) -> None:
        settings = settle(tmp_path, f"distributed_type: {ENGINES[weak]}", **{strong: "true"})
        assert [name for name in ENGINES if settings[name]] == [strong]
        assert settings["distributed_type"] == ENGINES[strong]
        assert settings.environment().get(str(settings.settings[weak].option.env), "false") == "false"

    def test_both_places_of_one_file_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as caught:
            settle(tmp_path, "distributed_type: FSDP\nuse_deepspeed: true\n")
        assert (
            f"use_deepspeed: true in {tmp_path}/c.yaml, line 2 and distributed_type: FSDP in {tmp_path}/c.yaml, line 1"
            in str(caught.value)
        )

    def test_a_flag_switches_the_files_engine_off(self, tmp_path: Path) -> None:
        settings = settle(tmp_path, "distributed_type: FSDP\n", use_fsdp="false")
        assert settings["use_fsdp"] is False and settings["distributed_type"] is None
        assert settings.environment()["ACCELERATE_USE_FSDP"] == "false" and "FSDP_VERSION" not in settings.environment()

    def test_tpu_and_cpu(self) -> None:
        with pytest.raises(ConfigurationError, match="--tpu and --cpu contradict"):
            settle(tpu="true", cpu="true")
        assert settle(tpu="true", environ={"ACCELERATE_USE_CPU": "true"})["cpu"] is False

    def test_multi_cpu_stays_on_the_cpu_whatever_the_same_file_says(self, tmp_path: Path) -> None:
        assert settle(tmp_path, "distributed_type: MULTI_CPU\nuse_cpu: false\n")["cpu"] is True
        assert settle(tmp_path, "distributed_type: MULTI_CPU\n", cpu="false")["cpu"] is False

    def test_a_section_asks_for_a_mesh(self, tmp_path: Path) -> None:
        text = (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 4\nparallelism_config: "
            "{parallelism_config_%s: 4}\n"
        )
        settings = settle(tmp_path, text % "dp_shard_size")
        assert settings["use_parallelism_config"] and "parallelism_config in " in settings.where(
            "use_parallelism_config"
        )
        assert settings.environment()["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"
        assert not settle(tmp_path, "parallelism_config: {}\n")["use_parallelism_config"]
        assert not settle(tmp_path, text % "tp_size", use_parallelism_config="false")["use_parallelism_config"]


VERSION_2 = {"use_fsdp": "true", "fsdp_version": "2"}


def test_secrets_are_in_no_message_and_no_environment() -> None:
    settings = settle(
        compute_environment="AMAZON_SAGEMAKER", aws_secret_access_key="hush", environ={"AWS_ACCESS_KEY_ID": "hush-id"}
    )
    assert settings["aws_secret_access_key"] == "hush"
    assert "hush" not in settings.where("aws_secret_access_key") + settings.where("aws_access_key_id")
    assert "AWS_SECRET_ACCESS_KEY" not in settings.environment()
    with pytest.raises(ConfigurationError, match="the value is not allowed") as caught:
        settle(aws_secret_access_key="hu\tsh")
    assert "hu" not in str(caught.value)


def test_deepspeed_has_no_defaults_of_its_own() -> None:
    exported = settle(use_deepspeed="true", zero_stage="3", zero3_init_flag="true").environment()
    assert exported == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"machine_rank": "2", "num_machines": "2"}, ["--machine_rank 2", "0 to 1"]),
        ({"machine_rank": "1"}, ["--machine_rank 1", "1 machine(s)"]),
        (
            {"use_fsdp": "true", "fsdp_cpu_ram_efficient_loading": "true", "fsdp_sync_module_states": "false"},
            ["--fsdp_sync_module_states false"],
        ),
        (
            {"use_deepspeed": "true", "deepspeed_inclusion_filter": "a:0", "deepspeed_exclusion_filter": "b"},
            ["--deepspeed_inclusion_filter a:0 and --deepspeed_exclusion_filter b contradict"],
        ),
        (
            {"use_parallelism_config": "true", "parallelism_config_cp_size": "2", "parallelism_config_sp_size": "2"},
            ["--parallelism_config_cp_size 2 and --parallelism_config_sp_size 2 contradict"],
        ),
        (
            {"use_fsdp": "true", "use_parallelism_config": "true", "parallelism_config_dp_shard_size": "2"},
            ["--parallelism_config_dp_shard_size 2 needs --fsdp_version 2, not 1 (default)"],
        ),
        (
            {"use_parallelism_config": "true", "parallelism_config_tp_size": "2", "num_processes": "3"},
            ["parallelism_config_tp_size=2", "= 2, but there are 3 processes (--num_processes 3)"],
        ),
        (
            {"use_megatron_lm": "true", "parallelism_config_ep_size": "2"},
            ["--parallelism_config_ep_size 2 has no effect on Megatron-core", "expert_model_parallel_size 2"],
        ),
        (
            {
                "use_parallelism_config": "true",
                "parallelism_config_tp_size": "2",
                "parallelism_config_dp_replicate_size": "3",
                "parallelism_config_ep_size": "3",
            },
            ["--parallelism_config_ep_size 3 does not divide dp_shard_size=1 x cp_size=1 x tp_size=2 = 2"],
        ),
        (
            {"use_parallelism_config": "true", "parallelism_config_sp_size": "2", "parallelism_config_ep_size": "2"},
            ["--parallelism_config_ep_size 2 and --parallelism_config_sp_size 2 contradict"],
        ),
        (
            {"use_megatron_lm": "true", "megatron_lm_tp_degree": "2", "num_processes": "3"},
            ["--num_processes 3 is not a multiple", "= 2"],
        ),
        (
            {"num_machines": "1:4", "use_deepspeed": "true"},
            ["--num_machines 1:4 and --use_deepspeed", "fixed number of processes"],
        ),
        ({"num_machines": "1:4", "ft": "true"}, ["--num_machines 1:4 and --ft", "Give the number of machines"]),
        ({"distributed_type": "DATA_PARALLEL"}, ["--distributed_type DATA_PARALLEL", "LOCAL_MACHINE"]),
        (
            {"compute_environment": "AMAZON_SAGEMAKER", "use_fsdp": "true"},
            ["--use_fsdp", "Allowed: NO, DATA_PARALLEL, MODEL_PARALLEL"],
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settle(**options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"use_fsdp": "true", "fsdp_sync_module_states": "false"},
        {
            "use_fsdp": "true",
            "fsdp_version": "2",
            "fsdp_sync_module_states": "false",
            "fsdp_cpu_ram_efficient_loading": "true",
        },
        {"use_deepspeed": "true", "zero_stage": "2", "offload_param_device": "none"},
        {"use_megatron_lm": "true", "megatron_lm_tp_degree": "2", "megatron_lm_pp_degree": "2", "num_processes": "4"},
        {"use_parallelism_config": "true", "parallelism_config_tp_size": "2"},
        {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL"},
        {"fp8_backend": "te"},
    ],
)
def test_what_goes_together(options: dict[str, str]) -> None:
    assert all(settle(**options).is_set(name) for name in options)


def test_a_range_of_machines_from_a_flag_a_file_and_torchruns_variable(tmp_path: Path) -> None:
    found = [
        settle(num_machines="2:4"),
        settle(environ={"PET_NNODES": "2:4"}),
        settle(tmp_path, "num_machines: 2:4\n"),  # YAML 1.1 reads a bare 2:4 as 124
    ]
    assert [settings.where("num_machines").partition(" in ")[0] for settings in found] == [
        *("--num_machines 2:4", "PET_NNODES=2:4", "num_machines: 2:4")
    ]
    for settings in found:
        machines = pickle.loads(pickle.dumps(settings["num_machines"]))
        assert (machines, machines.minimum, str(machines)) == (4, 2, "2:4")
    assert settle(environ={"PET_NNODES": "2"}, num_machines="3")["num_machines"] == 3
    for wrong in ("0", "2:1", "1:x", "-1", "1:2:3"):
        with pytest.raises(ConfigurationError, match=f"'{wrong}'"):
            settle(num_machines=wrong)


@pytest.mark.parametrize(
    ("options", "name", "value", "message"),
    [
        ({"zero_stage": "2"}, "zero_stage", 2, "--zero_stage 2 has no effect without --use_deepspeed"),
        ({"fsdp_offload_params": "true"}, "fsdp_offload_params", True, "has no effect without --use_fsdp"),
        ({"megatron_lm_tp_degree": "2"}, "megatron_lm_tp_degree", 2, "without --use_megatron_lm"),
        ({"ec2_instance_type": "m"}, "ec2_instance_type", "m", "without --compute_environment AMAZON_SAGEMAKER"),
        (
            {"use_deepspeed": "true", "zero_stage": "2", "offload_param_device": "cpu"},
            "offload_param_device",
            "none",
            "--offload_param_device cpu has no effect with --zero_stage 2, only from 3 on",
        ),
        (
            {"use_deepspeed": "true", "zero_stage": "0", "offload_optimizer_device": "nvme"},
            "offload_optimizer_device",
            "none",
            "--offload_optimizer_device nvme has no effect with --zero_stage 0, only from 1 on",
        ),
        (
            {**VERSION_2, "fsdp_backward_prefetch": "BACKWARD_POST"},
            "fsdp_backward_prefetch",
            None,
            "--fsdp_backward_prefetch BACKWARD_POST has no effect with --fsdp_version 2",
        ),
        ({**VERSION_2, "fsdp_forward_prefetch": "true"}, "fsdp_forward_prefetch", None, "--fsdp_forward_prefetch"),
        ({**VERSION_2, "fsdp_use_orig_params": "false"}, "fsdp_use_orig_params", None, "--fsdp_use_orig_params false"),
    ],
    ids=str,
)
def test_flags_without_an_effect_are_noted(options: dict[str, str], name: str, value: Any, message: str) -> None:
    settings = settle(**options)
    (note,) = settings.notes()
    assert message in note and settings[name] == value


def test_variables_and_files_may_be_meant_for_other_runs(tmp_path: Path) -> None:
    settings = settle(
        tmp_path, "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n", environ={"MEGATRON_LM_TP_DEGREE": "2"}
    )
    (note,) = settings.notes()
    assert (
        "fsdp_config.fsdp_version: 2 in" in note
        and "(and 1 more of its options) has no effect without --use_fsdp" in note
    )


class TestMigration:
    @pytest.mark.parametrize(
        ("text", "name", "value"),
        [
            ("fp16: true", "mixed_precision", "fp16"),
            ("fp16: false", "mixed_precision", "no"),
            ("fp16: true\nmixed_precision: fp16", "mixed_precision", "fp16"),
            ("fp16: false\nmixed_precision: bf16", "mixed_precision", "bf16"),
            ("dynamo_backend: 'INDUCTOR'", "dynamo_backend", "INDUCTOR"),
            ("fsdp_config: {sharding_strategy: 2}", "fsdp_sharding_strategy", "SHARD_GRAD_OP"),
            ("fsdp_config: {min_num_params: 7}", "fsdp_min_num_params", 7),
            ("fsdp_config: {offload_params: true}", "fsdp_offload_params", True),
            ("fsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_POST}", "fsdp_backward_prefetch", "BACKWARD_POST"),
            ("fp16: null\nnum_processes: -1", "num_processes", None),
            ("bf16: true\nfp16: false", "mixed_precision", "bf16"),
            ("fp16: false\nbf16: true", "mixed_precision", "bf16"),
        ],
    )
    def test_old_keys_are_read_with_a_note(self, tmp_path: Path, text: str, name: str, value: Any) -> None:
        settings = settle(tmp_path, text + "\n")
        assert settings[name] == value
        assert f"{tmp_path}/c.yaml, line " in settings.notes()[0] and "accel config update" in settings.notes()[0]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("mixed_precision: bf16\nfp16: true", "line 2: fp16=True contradicts mixed_precision='bf16' in .*line 1"),
            ("fp16: maybe", "fp16='maybe' is not true or false"),
            ("fp16: true\nbf16: true", "line 2: bf16=True contradicts mixed_precision='fp16' in .*line 1"),
            ("dynamo_backend: EAGER\ndynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_backend='EAGER' contradicts"),
            ("fsdp_config: {sharding_strategy: 9}", "fsdp_config.fsdp_sharding_strategy in .*'9' is not one of"),
        ],
    )
    def test_old_and_new_must_agree(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            settle(tmp_path, text + "\n")

    def test_equal_old_and_new_keys_and_empty_ones(self, tmp_path: Path) -> None:
        text = (
            "dynamo_backend: eager\ndynamo_config: {dynamo_backend: EAGER}\nfsdp_config: {sharding_strategy: "
            "null}\nmain_process_ip: ''\n"
        )
        settings = settle(tmp_path, text)
        assert settings["dynamo_backend"] == "EAGER" and settings["main_process_ip"] is None

    def test_accumulation_is_read_from_either_place(self, tmp_path: Path) -> None:
        settings = settle(tmp_path, "deepspeed_config: {gradient_accumulation_steps: 4}\n")
        assert settings["gradient_accumulation_steps"] == 4 and not settings.notes()
        with pytest.raises(ConfigurationError, match="both are --gradient_accumulation_steps"):
            settle(tmp_path, "gradient_accumulation_steps: 2\ndeepspeed_config: {gradient_accumulation_steps: 4}\n")

    def test_options_that_have_no_effect_any_more_are_noted(self, tmp_path: Path) -> None:
        settings = settle(tmp_path, "ipex_config: {ipex: true}\nuse_mps_device: false\n", use_xpu="true")
        assert [note.split(" has no effect")[0] for note in settings.notes()] == [
            f"ipex_config.ipex: true in {tmp_path}/c.yaml, line 1",
            "--use_xpu",
        ]


class TestDeepSpeedFile:
    def check(self, tmp_path: Path, content: Any, must_exist: bool = True, **options: str) -> None:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        check_deepspeed_file(settle(use_deepspeed="true", deepspeed_config_file=str(path), **options), must_exist)

    @pytest.mark.parametrize(
        ("content", "options", "names"),
        [
            ({"zero_optimization": {"stage": 3}}, {"zero_stage": "3"}, ["zero_stage"]),
            ({"gradient_clipping": 0}, {"gradient_clipping": "1"}, ["gradient_clipping"]),
            ({"bf16": {"enabled": True}}, {"mixed_precision": "fp16"}, ["mixed_precision"]),
            (
                {"bf16": {"enabled": True}, "zero_optimization": {"offload_param": {"device": "none"}}},
                {"offload_param_device": "cpu"},
                ["offload_param_device", "mixed_precision"],
            ),
        ],
    )
    def test_both_set(self, tmp_path: Path, content: Any, options: dict[str, str], names: list[str]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            self.check(tmp_path, content, **options)
        assert f"variables will be ignored: {names}." in str(caught.value)
        for name in options:
            assert f"--{name} " in str(caught.value) and "ds.json " in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "options"),
        [
            (
                {"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": "auto"}},
                {"zero_stage": "3", "mixed_precision": "bf16"},
            ),
            ({"bf16": {"enabled": True}}, {"mixed_precision": "bf16", "zero3_init_flag": "true"}),
            ({"bf16": {"enabled": True}}, {}),
            ({}, {"zero_stage": "1", "gradient_accumulation_steps": "3"}),
        ],
    )
    def test_what_the_file_leaves_open_may_be_set(self, tmp_path: Path, content: Any, options: dict[str, str]) -> None:
        self.check(tmp_path, content, **options)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not valid JSON"),
            ("[1]", "JSON object, not list"),
            ('"\\ud800', "not valid JSON"),
            ('{"bf16": {"enabled": true, "enabled": "auto"}}', "the key 'enabled' is given twice, as true and"),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path: Path, content: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=f"--deepspeed_config_file .*ds.json: .*{message}"):
            self.check(tmp_path, content)

    def test_a_missing_file(self) -> None:
        settings = settle(use_deepspeed="true", deepspeed_config_file="nowhere.json")
        check_deepspeed_file(settings, must_exist=False)
        with pytest.raises(ConfigurationError, match="--deepspeed_config_file nowhere.json: No"):
            check_deepspeed_file(settings)
        check_deepspeed_file(settle(environ={"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"}))


class TestValues:
    @pytest.mark.parametrize(
        ("name", "bad", "allowed"),
        [
            ("vm", ["a", {"b": 1}], "a list of texts"),
            ("vm", "[1", "a list of texts"),
            ("vm", {"a": 1}, "a list of texts"),
            ("sagemaker_additional_args", "{", "a mapping"),
            ("sagemaker_additional_args", "[1]", "a mapping"),
            ("sagemaker_additional_args", {1: 2}, "a mapping"),
            ("role", "a\nb", "control character"),
            ("num_processes", True, "an integer of at least 1"),
            ("num_processes", "9" * 5000, "an integer"),
            ("monitor_interval", "1e999", "a number"),
        ],
    )
    def test_values_that_are_none(self, name: str, bad: Any, allowed: str) -> None:
        with pytest.raises(ConfigurationError, match=f"--{name}: .*{allowed}"):
            settle(**{name: bad})

    def test_structures(self, tmp_path: Path) -> None:
        text = (
            "tpu_env: [A=1, 'B=2,3']\ncommands: echo hello, world\nadditional_args:\n  use_spot_instances: true\n  "
            "max_wait: 86400\n"
        )
        settings = settle(tmp_path, text)
        assert settings["env"] == ("A=1", "B=2,3") and settings["command"] == ("echo hello, world",)
        assert settings["sagemaker_additional_args"] == {"use_spot_instances": True, "max_wait": 86400}
        assert settings.settings["env"].source is Source.CONFIG_FILE
        assert settle(sagemaker_additional_args="{'a': True}", compute_environment="1")[
            "sagemaker_additional_args"
        ] == {"a": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x {b: *x}", "20000 values"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
                for before, name in itertools.pairwise("abcdefghij")
            ),
            "20000 values",
        ),
        (
            "a: &a {x: 1, y: 2}\n"
            + "".join(
                f"{name}: &{name} {{{', '.join(f'k{i}: *{before}' for i in range(9))}}}\n"
                for before, name in itertools.pairwise("abcdefghij")
            ),
            "20000 values",
        ),
        ("# " + "x" * 2**20, "1048576 bytes"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("num_processes: " + "9" * 9000, "line 1"),
    ],
)
def test_files_made_to_break_a_reader(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        ConfigFile.read(path)
    with pytest.raises(ConfigurationError, match="null"):
        ConfigFile.read("a\0b")


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"num_processes": 2}')
    assert ConfigFile.read(path).entries["num_processes"].value == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({f"fsdp_{name}": value}, f"--fsdp_{name} {value} .*--fsdp_version 2") for name, value in UNSUPPORTED),
        ({"fsdp_sharding_strategy": "4"}, "--fsdp_sharding_strategy 4 .*--parallelism_config_dp_replicate_size"),
        (
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": "true"},
            "SHARD_GRAD_OP .*--fsdp_reshard_after_forward false .*--fsdp_reshard_after_forward true",
        ),
    ],
)
def test_what_only_version_1_of_fsdp_can_do_is_refused_with_version_2(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settle(**VERSION_2, **options)
    settle(use_fsdp="true", **{name: value for name, value in options.items() if name != "fsdp_reshard_after_forward"})


def test_what_is_the_same_in_version_2_of_fsdp_is_said_in_its_words(tmp_path: Path) -> None:
    settings = settle(
        tmp_path,
        "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_backward_prefetch: BACKWARD_PRE}\n",
        **VERSION_2,
    )
    assert (
        settings["fsdp_reshard_after_forward"] is False
        and settings.environment()["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    )
    first, second = settings.notes()
    assert "fsdp_backward_prefetch: BACKWARD_PRE in" in first and "can be left out" in first
    assert "SHARD_GRAD_OP in" in second and second.endswith(
        "with --fsdp_version 2 it is --fsdp_reshard_after_forward false"
    )
    assert not settle(**VERSION_2, fsdp_use_orig_params="true", fsdp_sharding_strategy="FULL_SHARD")[
        "fsdp_forward_prefetch"
    ]
