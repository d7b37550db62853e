"""Every option is declared once: flag, variable, key and default agree, and the precedence holds, for each of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import ConfigurationError
from accel_state.options import (
    ConfigFile,
    Option,
    OptionGroup,
    ResourceOptions,
    Source,
    default_folder,
    find_default,
    load_groups,
    option,
    resolve,
)

GROUPS = load_groups()
OPTIONS = [opt for group in GROUPS for opt in group.options()]
# Values that options with a parser of their own take, as text; two different ones each.
SPECIAL = {
    "gpu_ids": ("0", "1,2"),
    "main_process_port": ("0", "4711"),
    "tee": ("3", "0:1,1:2"),
    "redirects": ("3", "0:1,1:2"),
    "local_ranks_filter": ("0", "0,1"),
    "monitor_port": ("9400", "127.0.0.1:9401"),
    "nproc_per_node": ("2", "auto"),
    "rdzv_conf": ("timeout=1", "timeout=2,b=3"),
    "fp8_override_linear_precision": ("true", "false,true,false"),
}

# Keys of the file format: where, and how the names of their options begin. Keys of older versions are among them.
KEYS = {
    ("fsdp_config.fsdp_", "fsdp_"): """
        activation_checkpointing activation_checkpointing_every activation_checkpointing_mode
        activation_checkpointing_offload auto_wrap_policy backward_prefetch cpu_ram_efficient_loading
        forward_prefetch ignored_modules min_num_params offload_params reshard_after_forward
        sharded_state_format sharding_strategy state_dict_type sync_module_states transformer_layer_cls_to_wrap
        use_orig_params version""",
    ("fsdp_config.", "fsdp_"): """
        auto_wrap_policy min_num_params offload_params sharding_strategy transformer_layer_cls_to_wrap""",
    ("megatron_lm_config.megatron_lm_", "megatron_lm_"): """
        attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss
        context_parallel_size decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size
        expert_tensor_parallel_size gradient_clipping hidden_dropout no_load_optim no_save_optim
        num_micro_batches optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations
        recompute_granularity recompute_method recompute_num_layers sequence_parallelism tp_degree
        use_custom_fsdp use_distributed_optimizer use_precision_aware_optimizer use_rotary_position_embeddings""",
    ("parallelism_config.parallelism_config_", "parallelism_config_"): """
        cp_backend cp_balance cp_comm_strategy cp_size dp_replicate_size dp_shard_size enable_async_tp ep_size
        pp_size sp_attn_implementation sp_backend sp_seq_length sp_seq_length_is_variable sp_size
        tp_sequence_parallel tp_size""",
    ("fp8_config.", "fp8_"): """
        amax_compute_algo amax_history_len ao_recipe backend enable_fsdp_float8_all_gather interval margin
        opt_level override_linear_precision pad_inner_dim scaling use_autocast_during_eval
        use_mxfp8_block_scaling""",
    ("dynamo_config.dynamo_", "dynamo_"): "backend mode use_dynamic use_fullgraph use_regional_compilation",
    ("deepspeed_config.", ""): """
        deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
        deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
        offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path
        zero3_init_flag zero3_save_16bit_model zero_stage""",
    ("ft_config.", ""): "heartbeat_timeout min_replicas num_replicas num_spares processes_per_replica replica_timeout",
    ("ipex_config.", ""): "ipex use_xpu",
    ("mpirun_config.", ""): "mpirun_ccl mpirun_hostfile",
    ("", ""): """
        activation_checkpointing activation_checkpointing_blocks activation_checkpointing_every
        activation_checkpointing_mode activation_checkpointing_offload base_job_name command_file
        compute_environment debug distributed_type downcast_bf16 dynamo_backend ec2_instance_type
        enable_cpu_affinity ft gpu_ids gradient_accumulation_steps hang_report_seconds iam_role_name
        image_uri log_dir machine_rank machine_timeout main_process_ip main_process_port
        main_training_function max_restarts mixed_precision monitor monitor_interval monitor_port multi_gpu
        num_cpu_threads_per_process num_machines num_processes oversubscribe py_version pytorch_version
        rdzv_backend rdzv_conf role sagemaker_inputs_file sagemaker_metrics_file same_network strategy tee tpu
        tpu_cluster tpu_name tpu_use_sudo tpu_zone transformers_version use_deepspeed use_fsdp
        use_megatron_lm use_mps_device use_parallelism_config""",
}
# Those whose options are called otherwise: KEY=OPTION.
OTHER_KEYS = """
    use_cpu=cpu fsdp_config.fsdp_backward_prefetch_policy=fsdp_backward_prefetch
    tp_config.tp_size=parallelism_config_tp_size fp8_config.fp8_format=fp8_format
    fp8_config.amax_history_length=fp8_amax_history_len fp8_config.amax_compute_algorithm=fp8_amax_compute_algo
    fp8_config.optimization_level=fp8_opt_level tpu_use_cluster=tpu_cluster tpu_vm=vm tpu_env=env commands=command
    profile=aws_profile region=aws_region additional_args=sagemaker_additional_args
"""

TEXTS: dict[type, tuple[str, str]] = {
    bool: ("true", "false"),
    int: ("3", "5"),
    float: ("0.5", "2"),
    str: ("first", "second"),
    tuple: ("first", '["second", "th,ird"]'),
    dict: ('{"a": 1}', '{"b": {"c": true}}'),
}


def group_of(opt: Option) -> type[OptionGroup]:
    return next(group for group in GROUPS if opt in group.options())


def two_texts(opt: Option) -> tuple[str, str]:
    """Two texts with different values, neither of them the default where there is a choice."""
    if opt.name in SPECIAL:
        return SPECIAL[opt.name]
    if opt.choices:
        others = [choice for choice in opt.choices if opt.parse(choice, "") != opt.default]
        return (others or opt.choices)[0], next(choice for choice in opt.choices if choice not in others[:1])
    return TEXTS[opt.kind]


def write_config(folder: Path, values: dict[str, Any]) -> ConfigFile:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    path = folder / "config.json"
    path.write_text(json.dumps(nested, indent=1))
    return ConfigFile.read(path)


def test_names_flags_variables_and_keys_are_unique() -> None:
    for values in (
        [opt.name for opt in OPTIONS],
        [f for opt in OPTIONS for f in (*opt.flags, *opt.undo_flags)],
        [opt.env for opt in OPTIONS if opt.env],
        [key for opt in OPTIONS for key in opt.keys],
    ):
        assert len(values) == len(set(values))


def test_keys_are_those_of_the_format() -> None:
    """A file of another program, or of an older version, has these; the other tests take what is declared."""
    expected = {place + name: prefix + name for (place, prefix), names in KEYS.items() for name in names.split()}
    expected |= dict(pair.split("=") for pair in OTHER_KEYS.split())
    assert {key: opt.name for opt in OPTIONS for key in opt.keys} == expected


def test_declarations_are_whole() -> None:
    for opt in OPTIONS:
        assert opt.help.endswith(".") and len(opt.help) > 20, opt.name
        assert opt.default in (None, "", ()) or opt.parse(opt.format(opt.default), "") == opt.default, opt.name
        assert opt.suggested is None or opt.parse(opt.format(opt.suggested), "") == opt.suggested, opt.name
        assert opt.question is None or opt.question.endswith(("?", ".")), f"{opt.name}: asked of people"
        assert not opt.other_keys or opt.key, opt.name
        assert not opt.secret or opt.key is None, f"{opt.name}: a secret is never stored in a file"
        assert not opt.exported or opt.env, f"{opt.name}: an option that is handed to processes needs a variable"
        assert opt.flags[0].startswith("--") and "-" not in opt.flags[0][2:], opt.name
        if "_" in opt.flags[0]:
            assert "--" + opt.flags[0][2:].replace("_", "-") in opt.flags, opt.name


def test_flag_environment_and_file_give_the_same_value(tmp_path: Path) -> None:
    for opt in OPTIONS:
        for text in two_texts(opt):
            parser = argparse.ArgumentParser()
            group_of(opt).add_to_parser(parser)
            expected = opt.parse(text, "here")
            for flag in opt.flags:
                words = [f"{flag}={text}"] if opt.is_flag and flag.startswith("--") else [flag, text]
                given = vars(parser.parse_args(words))
                assert given == {opt.name: [text] if opt.kind is tuple else text}
                given[opt.name] = text
                resolved = resolve([group_of(opt)], given, environ={})
                assert resolved[opt.name] == expected and resolved.settings[opt.name].source is Source.COMMAND_LINE
            if opt.env:
                resolved = resolve([group_of(opt)], environ={opt.env: text})
                assert resolved[opt.name] == expected and resolved.settings[opt.name].source is Source.ENVIRONMENT
                assert getattr(group_of(opt).from_environment({opt.env: text}), opt.field) == expected
            for key in opt.keys:
                config = write_config(tmp_path, {key: expected})
                resolved = resolve([group_of(opt)], environ={}, config=config)
                assert resolved[opt.name] == expected and resolved.settings[opt.name].source is Source.CONFIG_FILE
                assert "line" in resolved.where(opt.name)


def test_precedence(tmp_path: Path) -> None:
    """Command line > environment > file."""
    config = write_config(tmp_path, {"mixed_precision": "fp16"})
    given, environ = {"mixed_precision": "no"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}
    found = [resolve(GROUPS, *sources, config=config) for sources in (({}, {}), ({}, environ), (given, environ))]
    assert [settings["mixed_precision"] for settings in found] == ["fp16", "bf16", "no"]


def test_exported_option_reaches_the_process_and_comes_back() -> None:
    for opt in [opt for opt in OPTIONS if opt.exported]:
        for text in two_texts(opt):
            resolved = resolve(GROUPS, {opt.name: text}, environ={})
            environment = resolved.environment()
            enabled = [
                other.env
                for group in GROUPS
                if group.enabled_by and resolved.is_enabled(group)
                for other in group.options()
            ]
            assert opt.env in environment and set(environment) <= {opt.env, *enabled}
            assert getattr(group_of(opt).from_environment(environment), opt.field) == resolved[opt.name]


def test_unset_options_export_nothing() -> None:
    assert resolve(GROUPS, environ={}).environment() == {}
    assert resolve(GROUPS, {"num_processes": "2", "module": "true"}, environ={}).environment() == {}


def test_bad_values_name_where_they_stand(tmp_path: Path) -> None:
    for opt in [opt for opt in OPTIONS if opt.kind not in (str, tuple) or opt.choices or opt.name in SPECIAL]:
        for bad in ("?!x", "nan,"):
            for where, arguments in {
                opt.flags[0]: ({opt.name: bad}, {}),
                str(opt.env): ({}, {str(opt.env): bad}),
            }.items():
                if where != "None":
                    with pytest.raises(ConfigurationError, match=where) as caught:
                        resolve(GROUPS, *arguments)
                    assert bad.strip(",") in str(caught.value)
        if opt.key:
            with pytest.raises(ConfigurationError, match=rf"{opt.key} in .*config.json, line \d"):
                resolve(GROUPS, environ={}, config=write_config(tmp_path, {opt.key: "?!x"}))


def test_minimum() -> None:
    for opt in [opt for opt in OPTIONS if opt.minimum is not None]:
        assert opt.minimum is not None
        assert opt.parse(str(opt.kind(opt.minimum)), "") == opt.minimum
        with pytest.raises(ConfigurationError, match="at least" if opt.maximum is None else f"from {opt.minimum:g} to"):
            opt.parse(str(opt.kind(opt.minimum) - 1), "here")
        if opt.maximum is not None:
            assert opt.parse(str(opt.maximum), "") == opt.maximum
            with pytest.raises(ConfigurationError, match="from"):
                opt.parse(str(opt.maximum + 1), "here")
        if opt.kind is float:
            for bad in ("inf", "nan"):
                with pytest.raises(ConfigurationError, match="here"):
                    opt.parse(bad, "here")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_help_shows_every_option(group: type[OptionGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")  # no line is broken inside a word
    parser = argparse.ArgumentParser()
    group.add_to_parser(parser)
    text = " ".join(parser.format_help().split())
    for opt in group.options():
        assert opt.flags[0] in text and " ".join(opt.help.split()) in text
        assert opt.env is None or opt.env in text


def test_a_flag_undoes_a_variable() -> None:
    resolved = resolve(GROUPS, {"cpu": "false"}, environ={"ACCELERATE_USE_CPU": "true"})
    assert resolved["cpu"] is False and resolved.environment() == {"ACCELERATE_USE_CPU": "false"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_processes"):
        resolve([ResourceOptions], {"nproc": 3}, environ={})


@dataclasses.dataclass(frozen=True)
class CacheOptions(OptionGroup):
    title = "cache"
    size: int = option(
        4, help="Number of entries.", prefix="cache_", env_prefix="CACHE_", exported=True, minimum=2, section="cache"
    )
    policy: str = option("lru", help="Replacement policy.", choices=("lru", "fifo"), env=None, name="eviction")
    tags: tuple[str, ...] = option((), help="Labels.", key=None)


def test_a_plugin_reads_and_checks_by_the_declaration() -> None:
    assert CacheOptions.read("size", {"CACHE_SIZE": "8"}) == 8 and CacheOptions.read("size", {}) == 4
    with pytest.raises(ConfigurationError, match="CACHE_SIZE: '1'"):
        CacheOptions.read("size", {"CACHE_SIZE": "1"})
    assert CacheOptions.declaration("policy").check("policy", "FIFO") == "fifo"
    assert CacheOptions.declaration("size").check("size", 2) == 2
    for field, value in {"size": True, "policy": 3}.items():
        with pytest.raises(ConfigurationError, match=f"{field}={value} is not"):
            CacheOptions.declaration(field).check(field, value)
    with pytest.raises(ConfigurationError, match="size=1 is not an integer of at least 2"):
        CacheOptions.declaration("size").check("size", 1)


def test_names_may_be_a_list() -> None:
    separated = [opt for opt in OPTIONS if opt.separated]
    assert {opt.name for opt in separated} == {opt.name for opt in OPTIONS if "separated by commas" in opt.help}
    for opt in separated:
        for raw in (["One", "Two"], ("One", "Two"), "One,Two"):
            assert opt.parse(raw, opt.name) == "One,Two"
        for wrong, message in (([1, 2], "is not a list of names"), ([], "is empty"), ({"One": 1}, "is not text")):
            with pytest.raises(ConfigurationError, match=message):
                opt.parse(wrong, opt.name)


@pytest.mark.parametrize("key", ["rdzv_endpoint", "endpoint", "backend", "rdzv_id", "master_port", "max_nodes", "rank"])
def test_settings_of_the_rendezvous_that_are_options_are_refused(key: str) -> None:
    (opt,) = [opt for opt in OPTIONS if opt.name == "rdzv_conf"]
    with pytest.raises(ConfigurationError, match=f"--rdzv_conf: {key} is not one of its settings; give --"):
        opt.parse(f"timeout=3, {key}=1", "--rdzv_conf")
    assert opt.parse("timeout=3,is_host=1", "--rdzv_conf") == "timeout=3,is_host=1"


def test_yaml_reads_no_as_false_and_we_as_no(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: no\nnum_processes: 2\n")
    assert resolve(GROUPS, environ={}, config=ConfigFile.read(path))["mixed_precision"] == "no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML or JSON"),
        ("- 1\n- 2", "must be a mapping"),
        ("num_processes: 2\nnum_machines: 1\nnum_processes: 3", r"line 3: num_processes is given twice; .*line 1"),
        ("[1]: 2", r"line 1: a key must be a name"),
        ("x: !!python/object:os.system 1", r"line 1"),
        ("when: 2026-99-99", r"line 1"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        ConfigFile.read(path)
    assert str(path) in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nope.yaml: No such file"):
        ConfigFile.read(tmp_path / "nope.yaml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        ConfigFile.read(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        ConfigFile.read(tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert ConfigFile.read(tmp_path / "empty.yaml").entries == {}
    (tmp_path / "empty.yaml").write_text("---\n# nothing yet\n")
    assert ConfigFile.read(tmp_path / "empty.yaml").entries == {}


def test_default_location(tmp_path: Path) -> None:
    assert default_folder({"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": "/other"}) == tmp_path / "accel"
    assert default_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/huggingface/accel")
    assert default_folder({}) == Path.home() / ".cache/huggingface/accel"
    assert find_default({"HF_HOME": str(tmp_path)}) is None
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "default_config.json").write_text("{}")
    assert find_default({"HF_HOME": str(tmp_path)}) == tmp_path / "accel" / "default_config.json"
    (tmp_path / "accel" / "default_config.yaml").write_text("")
    assert find_default({"HF_HOME": str(tmp_path)}) == tmp_path / "accel" / "default_config.yaml"
