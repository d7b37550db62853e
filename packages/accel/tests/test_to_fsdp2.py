"""`accel to-fsdp2`: a file of FSDP 1 becomes one of FSDP 2 that means the same, or stays as it is with a reason."""

from __future__ import annotations

import os

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies

from accel.commands.to_fsdp2 import COMMAND
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_launch.config.read import load_settings
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError

DOCUMENTED = """\
# the nodes of group B
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  # blocks
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP  # parameters fit
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 2
"""

CONVERTED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_version: 2
mixed_precision: bf16
num_processes: 2
"""


def convert(source, *options):
    return COMMAND.run(["--config_file", str(source), *map(str, options)])


def plugin_of(path, processes=None):
    """What a process that was launched with a file makes of it."""
    given = {"config_file": str(path)} | ({"num_processes": str(processes)} if processes else {})
    with patch_environment(**load_settings(given, environ={}).environment()):
        return FullyShardedDataParallelPlugin()


def test_a_file_is_converted(tmp_path, capsys) -> None:
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text(DOCUMENTED)
    assert convert(source, "--output_file", target) == 0
    assert target.read_text() == CONVERTED
    assert source.read_text() == DOCUMENTED
    said = capsys.readouterr().out.splitlines()
    starts = ["fsdp_sharding_strategy: SHARD_GRAD_OP becomes fsdp_reshard_after_forward: false"]
    starts += ["fsdp_backward_prefetch: BACKWARD_PRE is left out", "fsdp_forward_prefetch: false is left out"]
    starts += [
        "fsdp_sync_module_states: true is left out",
        "fsdp_use_orig_params: true is left out",
        "fsdp_version is 2",
        f"comments are not kept; they are in {source}",
    ]
    assert [line[: len(start)] for line, start in zip(said, starts, strict=False)] == starts
    assert said[-1] == f"Configuration of FSDP 2 saved in {target}"
    plugin = plugin_of(target)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.state_dict_type.name) == (
        2,
        False,
        "SHARDED_STATE_DICT",
    )


def test_keys_that_are_not_known_are_kept(tmp_path, capsys) -> None:
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text(DOCUMENTED.replace("fsdp_offload_params", "fsdp_offload_param") + "my_tool: {x: 1}\n")
    assert convert(source, "--output_file", target) == 0
    said = capsys.readouterr().out
    hint = "fsdp_offload_param is not a known key and is kept. Did you mean fsdp_config.fsdp_offload_params?"
    assert hint in said and "my_tool is not a known key and is kept." in said
    content = yaml.safe_load(target.read_text())
    assert content["fsdp_config"]["fsdp_offload_param"] is False and content["my_tool"] == {"x": 1}


def test_the_file_itself_is_replaced_only_when_asked_to(tmp_path) -> None:
    source = tmp_path / "one.yaml"
    source.write_text(DOCUMENTED)
    source.chmod(0o640)
    with pytest.raises(ConfigurationError, match="--output_file, or.*--overwrite"):
        convert(source)
    other = tmp_path / "other.yaml"
    other.write_text("num_processes: 3\n")
    with pytest.raises(ConfigurationError, match="other.yaml exists already"):
        convert(source, "--output_file", other)
    assert (source.read_text(), other.read_text()) == (DOCUMENTED, "num_processes: 3\n")
    assert convert(source, "--overwrite") == 0
    assert source.read_text() == CONVERTED
    assert source.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "one.yaml.bak").read_text() == DOCUMENTED
    assert sorted(os.listdir(tmp_path)) == ["one.yaml", "one.yaml.bak", "other.yaml"]


def test_a_file_of_version_2_is_left_alone(tmp_path, capsys) -> None:
    source, target = tmp_path / "two.yaml", tmp_path / "new.yaml"
    source.write_text(CONVERTED)
    assert convert(source, "--output_file", target) == 0
    said = capsys.readouterr().out
    assert not target.exists() and "fsdp_version: 2 in" in said and "saved" not in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("distributed_type: FSDP", "distributed_type: MULTI_GPU", "its distributed_type is MULTI_GPU"),
        ("SHARD_GRAD_OP", "NO_SHARD", "line 11: version 2 .* distributed_type: MULTI_GPU"),
        ("SHARD_GRAD_OP", "HYBRID_SHARD", "num_machines is 1, num_processes is 2. Set both"),
        ("SHARD_GRAD_OP", "HALF_SHARD", "'HALF_SHARD'"),
        ("# blocks", "blocks: [", "not valid YAML"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, old, new, message) -> None:
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text(DOCUMENTED.replace(old, new))
    with pytest.raises(ConfigurationError, match=message):
        convert(source, "--output_file", target)
    assert not target.exists()
    with pytest.raises(ConfigurationError, match="missing.yaml"):
        convert(tmp_path / "missing.yaml", "--output_file", target)


def test_a_copy_on_each_machine_becomes_a_mesh(tmp_path) -> None:
    source, target = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text(
        DOCUMENTED.replace("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2").replace(
            "num_processes: 2", "num_processes: 16\nnum_machines: 2"
        )
    )
    assert convert(source, "--output_file", target) == 0
    settings = load_settings({"config_file": str(target)}, environ={})
    assert settings["use_parallelism_config"] and not settings["fsdp_reshard_after_forward"]
    assert (settings["parallelism_config_dp_replicate_size"], settings["parallelism_config_dp_shard_size"]) == (2, 8)


def test_json_and_sections_on_one_line(tmp_path, capsys) -> None:
    source = tmp_path / "one.yaml"
    source.write_text(
        "# mine\ndistributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_state_dict_type: "
        "LOCAL_STATE_DICT}\n"
    )
    assert convert(source, "--output_file", tmp_path / "two.json") == 0
    said = capsys.readouterr().out
    assert "LOCAL_STATE_DICT becomes SHARDED_STATE_DICT" in said and "comments are not kept" in said
    after = {"fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2}
    assert yaml.safe_load((tmp_path / "two.json").read_text()) == {"distributed_type": "FSDP", "fsdp_config": after}
    (tmp_path / "bare.json").write_text('{"distributed_type": "FSDP"}')
    assert convert(tmp_path / "bare.json", "--overwrite") == 0
    plugin = plugin_of(tmp_path / "bare.json")
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.state_dict_type.name) == (
        2,
        True,
        "FULL_STATE_DICT",
    )


BOOLEANS = strategies.booleans()
SECTIONS = strategies.fixed_dictionaries(
    {},
    optional={
        "fsdp_sharding_strategy": strategies.sampled_from(
            ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, "5"]
        ),
        "fsdp_version": strategies.sampled_from([1, 2, None]),
        "fsdp_reshard_after_forward": BOOLEANS,
        "fsdp_auto_wrap_policy": strategies.sampled_from(
            ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", None]
        ),
        "fsdp_min_num_params": strategies.integers(0, 10**9),
        "fsdp_transformer_layer_cls_to_wrap": strategies.sampled_from(["BertLayer", "A,B"]),
        "fsdp_backward_prefetch_policy": strategies.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
        "fsdp_forward_prefetch": BOOLEANS,
        "fsdp_use_orig_params": BOOLEANS,
        "fsdp_sync_module_states": BOOLEANS,
        "fsdp_cpu_ram_efficient_loading": BOOLEANS,
        "fsdp_offload_params": BOOLEANS,
        "fsdp_state_dict_type": strategies.sampled_from(
            ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", None]
        ),
        "fsdp_activation_checkpointing": BOOLEANS,
    },
)
TOP = strategies.fixed_dictionaries(
    {"distributed_type": strategies.sampled_from(["FSDP", "FSDP", "FSDP", "MULTI_GPU"])},
    optional={
        "num_processes": strategies.sampled_from([1, 2, 8]),
        "num_machines": strategies.sampled_from([1, 2, 3]),
        "mixed_precision": strategies.sampled_from(["no", "bf16"]),
    },
)


FORMS = strategies.tuples(strategies.sampled_from([None, False, True]), strategies.sampled_from(["yaml", "json"]))


@given(top=TOP, section=strategies.none() | SECTIONS, form=FORMS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_written_loads_as_version_2_and_nothing_else_is_changed(tmp_path, capsys, top, section, form) -> None:
    flow, ending = form
    source, target = tmp_path / "one.yaml", tmp_path / f"two.{ending}"
    target.unlink(missing_ok=True)
    content = {**top, **({} if section is None else {"fsdp_config": section})}
    source.write_text(yaml.safe_dump(content, default_flow_style=flow))
    before = source.read_text()
    try:
        assert convert(source, "--output_file", target) == 0
    except ConfigurationError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "FSDP" in refused or "fsdp" in refused or "num_" in refused, refused
        assert not target.exists()
        return
    said = capsys.readouterr().out
    assert source.read_text() == before
    if not target.exists():
        assert "nothing was written" in said and section["fsdp_version"] == 2
        return
    plugin, was = plugin_of(target), plugin_of(source)
    assert (plugin.fsdp_version, was.fsdp_version) == (2, 1)
    assert plugin.reshard_after_forward is (was.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"))
    for name in (
        "auto_wrap_policy",
        "activation_checkpointing",
        "min_num_params",
        "transformer_cls_names_to_wrap",
        "sync_module_states",
    ):
        assert getattr(plugin, name) == getattr(was, name)
    assert plugin.offloads == was.offloads
    states = {"LOCAL_STATE_DICT": "SHARDED_STATE_DICT"}.get(was.state_dict_type.name, was.state_dict_type.name)
    assert plugin.state_dict_type.name == states
    after = yaml.safe_load(target.read_text())
    assert {key: value for key, value in after.items() if key in top} == top


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch) -> None:
    source = tmp_path / "one.yaml"
    source.write_text(DOCUMENTED)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        convert(source, "--overwrite")
    assert source.read_text() == DOCUMENTED
    assert sorted(os.listdir(tmp_path)) == ["one.yaml", "one.yaml.bak"]
