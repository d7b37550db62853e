"""The settings of FSDP: from code, from the launcher's variables, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from accel.fsdp.plugin import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from accel.fsdp.wrap_policy import find_units, owned_by
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.options import FsdpOptions
from accel_state.options.fsdp_versions import UNSUPPORTED

# What the launcher hands over, and what the plugin makes of it.
LAUNCHED: list[tuple[dict[str, str], str, Any]] = [
    ({}, "fsdp_version", 1),
    ({"FSDP_VERSION": "2"}, "fsdp_version", 2),
    ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
    ({"FSDP_SHARDING_STRATEGY": "5"}, "sharding_strategy", ShardingStrategy._HYBRID_SHARD_ZERO2),
    ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "reshard_after_forward", False),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, "cpu_offload", CPUOffload(offload_params=True)),
    ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, "backward_prefetch", BackwardPrefetch.BACKWARD_POST),
    ({"FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"}, "backward_prefetch", None),
    ({"FSDP_FORWARD_PREFETCH": "true"}, "forward_prefetch", True),
    ({"FSDP_USE_ORIG_PARAMS": "false"}, "use_orig_params", False),
    ({"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}, "sync_module_states", False),
    ({"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "sync_module_states", True),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "activation_checkpointing", True),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "auto_wrap_policy", "size_based_wrap"),
    ({"FSDP_MIN_NUM_PARAMS": "2000"}, "min_num_params", 2000),
    ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B"}, "transformer_cls_names_to_wrap", ["A", "B"]),
    ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "state_dict_type", StateDictType.SHARDED_STATE_DICT),
    ({"FSDP_IGNORED_MODULES": "a.*"}, "ignored_modules", "a.*"),
]


@pytest.mark.parametrize(("variables", "field", "value"), LAUNCHED, ids=str)
def test_the_launchers_variables_are_read(variables: dict[str, str], field: str, value: Any) -> None:
    with patch_environment(**variables):
        assert getattr(FullyShardedDataParallelPlugin(), field) == value


def test_every_option_of_the_launcher_is_a_field() -> None:
    names = {option.field for option in FsdpOptions.options()}
    renamed = {
        "version": "fsdp_version",
        "offload_params": "cpu_offload",
        "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    }
    assert {renamed.get(name, name) for name in names} <= set(FullyShardedDataParallelPlugin.__dataclass_fields__)


@pytest.mark.parametrize("value", ["SHARD_GRAD_OP", 2, "2", ShardingStrategy.SHARD_GRAD_OP])
def test_a_strategy_by_name_number_and_itself(value: Any) -> None:
    assert FullyShardedDataParallelPlugin(sharding_strategy=value).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert (
        FullyShardedDataParallelPlugin(reshard_after_forward=value).sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    )
    assert FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy=value).reshard_after_forward is False


REFUSED = [
    ({"fsdp_version": 3}, "fsdp_version=3 is not one of 1, 2"),
    ({"sharding_strategy": "X"}, "sharding_strategy='X' is not one of FULL_SHARD"),
    ({"sharding_strategy": 9}, "sharding_strategy=9 is not one of"),
    ({"reshard_after_forward": True}, "reshard_after_forward=True is a setting of fsdp_version=2"),
    ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "Drop sharding_strategy"),
    ({"state_dict_type": "X"}, "state_dict_type='X' is not one of"),
    ({"backward_prefetch": "SOON"}, "backward_prefetch='SOON' is not one of"),
    ({"auto_wrap_policy": "by_hand"}, "auto_wrap_policy='by_hand' is not one of"),
    ({"auto_wrap_policy": 7}, "auto_wrap_policy=7 is neither"),
    ({"cpu_offload": "yes"}, "cpu_offload='yes' must be True, False or"),
    ({"fsdp_version": 2, "cpu_offload": CPUOffload(offload_params=True)}, "a torch.distributed.fsdp.OffloadPolicy"),
    ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
    ({"mixed_precision_policy": "fp4"}, "mixed_precision_policy='fp4' is not one of"),
    ({"mixed_precision_policy": {"dtype": torch.bfloat16}}, "nor a dictionary of param_dtype"),
    ({"fsdp_version": 2, "mixed_precision_policy": MixedPrecision()}, "nor a MixedPrecisionPolicy of torch"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_what_is_not_known_or_of_the_other_version_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FullyShardedDataParallelPlugin(**settings)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_only_version_1_can_do_is_refused_by_version_2(name: str, value: str) -> None:
    """The table is that of the launcher, which refuses the same: tests/test_option_conflicts.py of accel-state."""
    with pytest.raises(ConfigurationError, match=f"{name}={value}.*version 2"):
        FullyShardedDataParallelPlugin(fsdp_version=2, **{name: value})
    FullyShardedDataParallelPlugin(fsdp_version=1, **{name: value})
    variables = {"FSDP_VERSION": "2", f"FSDP_{name.upper()}": value}
    with patch_environment(**variables), pytest.raises(ConfigurationError, match=f"{name}={value}.*version 2"):
        FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(
    ("settings", "variables", "message"),
    [
        ({"backward_prefetch": "BACKWARD_POST"}, {}, "backward_prefetch='BACKWARD_POST' has no effect"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, {}, "backward_prefetch='BACKWARD_POST' has no effect"),
        ({"forward_prefetch": True}, {}, "forward_prefetch=True has no effect"),
        ({"use_orig_params": False}, {}, "use_orig_params=False has no effect"),
        ({"limit_all_gathers": False}, {}, "limit_all_gathers=False has no effect"),
        ({}, {"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, "FSDP_BACKWARD_PREFETCH=BACKWARD_POST has no effect"),
        ({}, {"FSDP_FORWARD_PREFETCH": "true"}, "FSDP_FORWARD_PREFETCH=true has no effect"),
        ({}, {"FSDP_USE_ORIG_PARAMS": "false"}, "FSDP_USE_ORIG_PARAMS=false has no effect"),
    ],
    ids=str,
)
def test_settings_of_version_1_without_an_effect_are_logged_once(
    settings: dict[str, Any],
    variables: dict[str, str],
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())
    with patch_environment(FSDP_VERSION="2", **variables):
        FullyShardedDataParallelPlugin(**settings)
        FullyShardedDataParallelPlugin(**settings)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and message in caplog.text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "AFTER_FORWARD=false .* has no effect with fsdp_version=1"),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}, "['Block'] .* has no effect with auto_wrap_policy=None"),
    ],
    ids=str,
)
def test_variables_without_an_effect_in_version_1_are_logged_once(
    variables: dict[str, str], message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_state.logging._already_warned", set())
    for other in ({}, {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}):
        with patch_environment(**variables, **other):
            FullyShardedDataParallelPlugin()
    assert len(caplog.records) == 1
    assert all(part in caplog.text for part in message.split(" .* "))


def test_code_wins_over_the_launcher_and_what_is_the_same_in_version_2_is_mapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin = FullyShardedDataParallelPlugin
    with patch_environment(FSDP_SHARDING_STRATEGY="NO_SHARD", FSDP_USE_ORIG_PARAMS="false"):
        given = plugin(sharding_strategy="FULL_SHARD", use_orig_params=True)
        assert given.sharding_strategy is ShardingStrategy.FULL_SHARD and given.use_orig_params is True
    with patch_environment(FSDP_VERSION="2", FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP", FSDP_USE_ORIG_PARAMS="false"):
        assert plugin().reshard_after_forward is False
        assert "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP is of fsdp_version=1" in caplog.text
        assert "with version 2 it is reshard_after_forward=False" in caplog.text
        assert plugin(reshard_after_forward=True).reshard_after_forward is True
        assert plugin(use_orig_params=True).use_orig_params is True


def test_policies_of_both_versions() -> None:
    first, second = (
        FullyShardedDataParallelPlugin(cpu_offload=True),
        FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True),
    )
    assert first.cpu_offload == CPUOffload(offload_params=True) and first.offloads
    assert isinstance(second.cpu_offload, CPUOffloadPolicy) and second.offloads
    assert type(FullyShardedDataParallelPlugin(fsdp_version=2).cpu_offload) is OffloadPolicy
    bf16 = torch.bfloat16
    assert FullyShardedDataParallelPlugin(mixed_precision_policy="bf16").precision_policy("no") == MixedPrecision(
        bf16, bf16, bf16
    )
    given = {"param_dtype": "bfloat16", "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(bf16, torch.float32)
    assert FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=given).precision_policy("no") == policy
    assert FullyShardedDataParallelPlugin(fsdp_version=2).precision_policy("bf16") == policy
    assert FullyShardedDataParallelPlugin().precision_policy("fp16") == MixedPrecision(torch.float16, torch.float32)
    assert FullyShardedDataParallelPlugin().precision_policy("no") is None
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == MixedPrecision(bf16, bf16, torch.float32)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype is bf16, "only with override"


def test_values_set_later_are_checked_on_request() -> None:
    plugin = FullyShardedDataParallelPlugin()
    plugin.validate_cpu_offload()
    plugin.validate_mixed_precision_policy()
    plugin.cpu_offload, plugin.mixed_precision_policy = "much", "fp4"
    with pytest.raises(ConfigurationError, match="cpu_offload=.much."):
        plugin.validate_cpu_offload()
    with pytest.raises(ConfigurationError, match="mixed_precision_policy='fp4'"):
        plugin.validate_mixed_precision_policy()
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    plugin.set_state_dict_type()
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT


def test_ram_efficient_loading_is_a_variable_that_transformers_reads() -> None:
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false", ACCELERATE_USE_FSDP="false"):
        enable_fsdp_ram_efficient_loading()
        assert FsdpOptions.from_environment().cpu_ram_efficient_loading is True
        disable_fsdp_ram_efficient_loading()
        assert FsdpOptions.from_environment().cpu_ram_efficient_loading is False


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Tree(nn.Module):
    _no_split_modules = ("Leaf", "OfARelative")

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.leaves = nn.ModuleList([Leaf(), Leaf()])
        if tied:
            self.leaves[0].a.weight = self.stem.weight


def test_units_by_class_size_and_torchs_own_policies() -> None:
    tree = Tree()
    leaves = [tree.leaves[1], tree.leaves[0]]
    by_class = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    assert find_units(tree, by_class.policy_for(tree)) == leaves
    assert find_units(tree, ModuleWrapPolicy({Leaf})) == leaves
    assert find_units(tree, by_class.policy_for(tree), [tree.leaves[0]]) == [tree.leaves[1]]
    by_size = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=40)
    assert set(find_units(tree, by_size.policy_for(tree))) <= set(tree.modules())
    for unit in find_units(tree, by_size.policy_for(tree)):
        assert sum(parameter.numel() for parameter in unit.parameters()) >= 40
    assert find_units(tree, FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap").policy_for(tree)) == []
    owned = owned_by(tree, leaves)
    assert sorted(len(modules) for modules in owned) == [3, 3, 3]
    assert {id(module) for modules in owned for module in modules} == {id(module) for module in tree.modules()}


def test_units_that_share_a_weight_with_others_are_none() -> None:
    tree = Tree(tied=True)
    policy = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap").policy_for(tree)
    assert find_units(tree, policy) == [tree.leaves[1]]


def test_set_auto_wrap_policy_is_torchs_form() -> None:
    tree = Tree()
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Leaf"]
    )
    plugin.set_auto_wrap_policy(tree)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Leaf}}


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"transformer_cls_names_to_wrap": ["Twig"]}, Tree(), "Tree has no module of class Twig. Set it to Leaf"),
        ({}, Leaf(), "Leaf has no _no_split_modules"),
    ],
)
def test_unknown_classes_are_refused(settings: dict[str, Any], model: nn.Module, message: str) -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", **settings)
    with pytest.raises(ConfigurationError, match=message):
        plugin.policy_for(model)


def test_ignored_modules_by_name_and_themselves(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree()
    assert FullyShardedDataParallelPlugin(ignored_modules=r"leaves\.\d").ignored_in(tree) == list(tree.leaves)
    assert FullyShardedDataParallelPlugin(ignored_modules=[tree.stem, nn.Linear(1, 1)]).ignored_in(tree) == [tree.stem]
    assert FullyShardedDataParallelPlugin(ignored_modules="roots").ignored_in(tree) == []
    assert "ignored_modules='roots' matches no module of Tree, so all are sharded" in caplog.text
    with pytest.raises(ConfigurationError, match="is not a valid regular expression"):
        FullyShardedDataParallelPlugin(ignored_modules="(").ignored_in(tree)
