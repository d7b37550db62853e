"""The values of "auto" when a model is prepared with DeepSpeed, and contradictions."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn

from accel import DeepSpeedPlugin
from accel.deepspeed.auto_values import hidden_size
from accel.deepspeed.config import PreparedFacts
from accel.deepspeed.config_paths import auto_paths, get_value
from accel.utils import DummyOptim, DummyScheduler
from accel_state import AcceleratorState, PartialState
from accel_state.errors import ConfigurationError
from accel_state.options.deepspeed import FILE_PATHS

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ZERO2, ZERO3 = ({"zero_optimization": {"stage": stage}} for stage in (2, 3))
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
}

OPTIMIZER, BOTH = {"optimizer": ADAMW}, {"optimizer": ADAMW, "scheduler": DECAY}


def model_of(**config: Any) -> Any:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)
    return model


MODEL = model_of(hidden_size=64)


@pytest.fixture(autouse=True)
def state(fresh_states: None) -> None:
    AcceleratorState(cpu=True)


def trained(**changes: Any) -> PreparedFacts:
    """The facts of a model with a torch optimizer and a loader with a batch size of 4."""
    known: dict[str, Any] = {
        "world_size": 2,
        "micro_batch_sizes": (4,),
        "gradient_accumulation_steps": 3,
        "model": MODEL,
        "optimizer": torch.optim.AdamW(MODEL.parameters(), lr=0.1),
    }
    return PreparedFacts(**{**known, **changes})


def resolve(config: dict[str, Any], facts: PreparedFacts | None = None, **fields: Any) -> dict[str, Any]:
    return DeepSpeedPlugin(hf_ds_config=config, **fields).resolve(facts or trained())


# What the JSON has; what prepare() knows; micro batch, accumulation steps and train batch in the end.
BATCHES: list[tuple[dict[str, Any], dict[str, Any], tuple[int, int, int]]] = [
    ({MICRO: "auto", STEPS: "auto", TRAIN: "auto"}, {}, (4, 3, 24)),
    ({}, {}, (4, 3, 24)),
    ({MICRO: 8, STEPS: 5}, {}, (8, 5, 80)),
    ({STEPS: 10, TRAIN: "auto"}, {}, (4, 10, 80)),
    ({TRAIN: 24, MICRO: "auto", STEPS: "auto"}, {}, (4, 3, 24)),
    ({TRAIN: 24}, {"micro_batch_sizes": ()}, (4, 3, 24)),
    ({TRAIN: 64, MICRO: 4}, {"gradient_accumulation_steps": 1}, (4, 8, 64)),
    ({}, {"micro_batch_sizes": (8, 4, None)}, (4, 3, 24)),
    ({}, {"micro_batch_sizes": (), "known_micro_batch_size": 6}, (6, 3, 36)),
    ({MICRO: 1}, {"micro_batch_sizes": (), "optimizer": None, "gradient_accumulation_steps": 1}, (1, 1, 2)),
    ({}, {"micro_batch_sizes": (), "optimizer": None, "world_size": 1}, (1, 3, 3)),
    ({MICRO: None, STEPS: None, TRAIN: None}, {}, (4, 3, 24)),
]


class TestBatches:
    @pytest.mark.parametrize(("config", "facts", "sizes"), BATCHES, ids=str)
    def test_sizes(self, config: dict[str, Any], facts: dict[str, Any], sizes: tuple[int, int, int]) -> None:
        done = resolve({**ZERO2, **config}, trained(**facts))
        assert (done[MICRO], done[STEPS], done[TRAIN]) == sizes

    def test_accumulation_steps_are_derived(self) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config={**ZERO2, TRAIN: 24, MICRO: 4})
        assert plugin.accumulation_steps == 6  # of one process
        plugin.resolve(trained(world_size=1, gradient_accumulation_steps=6))
        assert plugin.accumulation_steps == 6 and plugin.get_value(STEPS) == 6
        assert DeepSpeedPlugin(hf_ds_config={**ZERO2, TRAIN: 24, MICRO: 4, STEPS: "auto"}).accumulation_steps is None

    def test_largest_batch_of_several_loaders(self) -> None:
        assert resolve(ZERO2, trained(micro_batch_sizes=(8, 4)), is_train_batch_min=False)[MICRO] == 8

    @pytest.mark.parametrize(
        ("config", "facts", "parts"),
        [
            ({TRAIN: 10, MICRO: 4, STEPS: 3}, {}, [f"{TRAIN}: 10", f"{MICRO}=4 x {STEPS}=3 x 2 processes = 24"]),
            ({TRAIN: 64, MICRO: "auto"}, {}, ["the loader's batch size of 4 x", "accumulation_steps=3)", "= 24"]),
            ({TRAIN: 64, MICRO: 4, STEPS: "auto"}, {}, [f"{MICRO}=4 x Accelerator({STEPS}=3) x 2 processes = 24"]),
            ({TRAIN: 7}, {"micro_batch_sizes": ()}, ["a derived micro batch of 1 x", "= 6"]),
            ({TRAIN: 7}, {"micro_batch_sizes": (), "known_micro_batch_size": 9}, ["a derived micro batch of 1"]),
            ({MICRO: "auto"}, {"micro_batch_sizes": ()}, ["no loader came", f"deepspeed_config['{MICRO}'] = ..."]),
            ({}, {"micro_batch_sizes": (None,)}, ["loaders without a batch_size came with the model"]),
        ],
        ids=str,
    )
    def test_contradictions(self, config: dict[str, Any], facts: dict[str, Any], parts: list[str]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            resolve({**ZERO2, **config}, trained(**facts))
        for part in ["hf_ds_config has ", *parts]:
            assert part in str(caught.value)

    def test_micro_batch_that_differs_from_the_loaders_warns(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            resolve({**ZERO2, MICRO: 5}, trained(micro_batch_sizes=(7,)))
        assert f"hf_ds_config has {MICRO}: 5, but the loaders have batch sizes of 7 per process" in caplog.text

    def test_micro_batch_of_another_plugin(self) -> None:
        first, second = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
        AcceleratorState().deepspeed_plugins = {"first": first, "second": second}
        with pytest.raises(ConfigurationError, match="no loader came with the model"):
            second.resolve(trained(micro_batch_sizes=()))
        first.resolve(trained())
        assert second.resolve(trained(micro_batch_sizes=()))[MICRO] == 4


BY_HIDDEN_SIZE = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
}


class TestHiddenSize:
    @pytest.mark.parametrize(
        ("model", "size"),
        [
            (model_of(hidden_size=64), 64),
            (model_of(hidden_sizes=[32, 96, 64]), 96),
            (model_of(text_config=SimpleNamespace(hidden_size=24)), 24),
            (model_of(text_config={"hidden_sizes": [8, 16]}), 16),
            (model_of(hidden_size="wide"), None),
            (model_of(), None),
            (nn.Linear(2, 2), None),
            (None, None),
        ],
    )
    def test_lookup(self, model: Any, size: int | None) -> None:
        assert hidden_size(model) == size

    def test_the_three_values(self) -> None:
        zero = resolve(BY_HIDDEN_SIZE, trained(model=model_of(hidden_size=101)))["zero_optimization"]
        assert zero == {
            "stage": 3,
            "reduce_bucket_size": 10201,
            "stage3_prefetch_bucket_size": int(0.9 * 10201),
            "stage3_param_persistence_threshold": 1010,
        }

    def test_values_set_by_the_script_are_kept(self) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=BY_HIDDEN_SIZE)
        plugin.resolve(trained())
        plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 5
        plugin.deepspeed_config[MICRO] = 2
        done = plugin.resolve(trained(model=model_of(hidden_size=8), micro_batch_sizes=(2,)))
        zero = done["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (5, 57)
        assert (done[MICRO], done[TRAIN]) == (2, 12)

    def test_missing_hidden_size(self) -> None:
        with pytest.raises(ConfigurationError, match="reduce_bucket_size, .*stage3_param_persistence_threshold, "):
            resolve(BY_HIDDEN_SIZE, trained(model=nn.Linear(2, 2)))
        config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}}
        assert resolve(config, trained(model=nn.Linear(2, 2)))["zero_optimization"] == {
            "stage": 3,
            "reduce_bucket_size": 7,
        }


def dummies(**changes: Any) -> PreparedFacts:
    optimizer = DummyOptim(list(MODEL.parameters()), lr=0.25, weight_decay=0.5)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
    return trained(**{"optimizer": optimizer, "scheduler": scheduler, **changes})


class CustomSchedule:
    """A scheduler that accepts any optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class TestDummies:
    def test_optimizer_and_scheduler_of_the_configuration(self) -> None:
        done = resolve({**ZERO2, "optimizer": ADAMW, "scheduler": DECAY}, dummies())
        assert done["optimizer"]["params"] == {"lr": 0.25, "weight_decay": 0.5, "torch_adam": True, "adam_w_mode": True}
        assert done["scheduler"]["params"] == {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.25,
            "warmup_num_steps": 10,
            "total_num_steps": 100,
        }
        assert "zero_allow_untested_optimizer" not in done

    def test_scheduler_steps_are_divided_by_the_processes(self) -> None:
        """A schedule of 101 steps on one process has 51 steps on two."""
        optimizer = DummyOptim([], lr=1.0)
        facts = trained(optimizer=optimizer, scheduler=DummyScheduler(optimizer, 101, 10), scheduler_steps_per_step=2)
        params = resolve({**ZERO2, "optimizer": ADAMW, "scheduler": DECAY}, facts)["scheduler"]["params"]
        assert (params["total_num_steps"], params["warmup_num_steps"]) == (51, 5)

    def test_optimizer_and_scheduler_of_the_script(self) -> None:
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
        done = resolve(ZERO2, trained(optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1)))
        assert done["zero_allow_untested_optimizer"] is True and "optimizer" not in done and "scheduler" not in done
        assert resolve({**ZERO2, "zero_allow_untested_optimizer": False})["zero_allow_untested_optimizer"] is False

    def test_script_optimizer_with_configured_scheduler(self) -> None:
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.7)
        done = resolve(
            {**ZERO2, "scheduler": DECAY}, trained(optimizer=optimizer, scheduler=DummyScheduler(optimizer, 8, 2))
        )
        params = done["scheduler"]["params"]
        assert (params["warmup_max_lr"], params["total_num_steps"]) == (0.7, 8)

    def test_configured_optimizer_with_script_scheduler(self) -> None:
        """Refused, except with lr_scheduler_callable."""
        optimizer = DummyOptim([], lr=0.1)
        with pytest.raises(ConfigurationError, match="DummyOptim.*CustomSchedule.*DeepSpeed"):
            resolve({**ZERO2, "optimizer": ADAMW}, trained(optimizer=optimizer, scheduler=CustomSchedule(optimizer)))
        facts = trained(optimizer=optimizer, scheduler=DummyScheduler(optimizer, lr_scheduler_callable=CustomSchedule))
        assert "scheduler" not in resolve({**ZERO2, "optimizer": ADAMW}, facts)

    def test_further_parameters(self) -> None:
        config = {**ZERO2, "optimizer": {"type": "AdamW", "params": {"lr": 3.0, "betas": "auto", "eps": "auto"}}}
        config["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 5, "cos_min_ratio": "auto", "warmup_min_ratio": 0.1},
        }
        optimizer = DummyOptim([], lr=0.1, betas=(0.8, 0.9))
        done = resolve(config, trained(optimizer=optimizer, scheduler=DummyScheduler(optimizer, cos_min_ratio=0.2)))
        assert done["optimizer"]["params"] == {"lr": 3.0, "betas": [0.8, 0.9]}
        assert done["scheduler"]["params"] == {"total_num_steps": 5, "cos_min_ratio": 0.2, "warmup_min_ratio": 0.1}

    @pytest.mark.parametrize(
        ("config", "facts", "message"),
        [
            (OPTIMIZER, trained(), "optimizer AdamW, and the script prepares AdamW as well. Prepare DummyOptim"),
            (
                {"scheduler": DECAY},
                trained(scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(MODEL.parameters(), lr=1.0))),
                "scheduler WarmupDecayLR, and the script prepares ConstantLR as well. Prepare DummyScheduler",
            ),
            ({}, dummies(scheduler=None), 'prepares DummyOptim, but hf_ds_config has no "optimizer"'),
            (OPTIMIZER, dummies(), 'prepares DummyScheduler, but hf_ds_config has no "scheduler"'),
            (
                BOTH,
                dummies(scheduler=DummyScheduler(None, lr_scheduler_callable=CustomSchedule)),
                r"scheduler WarmupDecayLR, and DummyScheduler\(lr_scheduler_callable=",
            ),
            ({"scheduler": DECAY}, dummies(optimizer=None), "prepares DummyScheduler without an optimizer"),
            (BOTH, dummies(scheduler=DummyScheduler(None)), r"total_num_steps, .* DummyScheduler\(.*total_num_steps="),
            (BOTH, dummies(scheduler=None), "scheduler.params.warmup_num_steps, scheduler.params.total"),
        ],
    )
    def test_refused_combinations(self, config: dict[str, Any], facts: PreparedFacts, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            resolve({**ZERO2, **config}, facts)

    def test_models_that_are_not_trained(self) -> None:
        plugin = DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {"stage": 3}, "optimizer": ADAMW, "scheduler": DECAY, MICRO: 1}
        )
        done = plugin.resolve(trained(optimizer=None))
        assert "optimizer" not in done and "scheduler" not in done
        assert plugin.deepspeed_config["optimizer"] == ADAMW
        assert plugin.resolve(dummies())["optimizer"]["params"]["lr"] == 0.25


class TestTheRest:
    def test_clipping_is_off_by_default(self) -> None:
        for config in (ZERO2, {**ZERO2, "gradient_clipping": "auto"}, {**ZERO2, "gradient_clipping": None}):
            assert resolve(config)["gradient_clipping"] == 0.0
        assert resolve({**ZERO2, "gradient_clipping": 0.7})["gradient_clipping"] == 0.7

    def test_auto_values_with_a_default_in_deepspeed_are_removed(self) -> None:
        config = {
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": "auto",
                "offload_param": {"device": "cpu", "pin_memory": "auto"},
            },
            "fp16": {"enabled": "auto", "loss_scale": "auto"},
            "data_types": {"keep_in_fp32_modules": "auto"},
        }
        done = resolve(config)
        assert done["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
        assert done["fp16"] == {"enabled": False} and done["data_types"] == {"keep_in_fp32_modules": "auto"}

    def test_null_sections(self) -> None:
        plugin = DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {"stage": 3, "offload_param": None}, "fp16": None, "optimizer": None},
            offload_param_device="cpu",
        )
        done = plugin.resolve(trained(mixed_precision="bf16"))
        assert done["zero_optimization"]["offload_param"] == {"device": "cpu"} and done["fp16"] == {"enabled": False}
        plugin.deepspeed_config["fp16"] = None
        assert plugin.resolve(trained())["fp16"] == {"enabled": False}
        plugin.deepspeed_config["scheduler"] = 5
        with pytest.raises(ConfigurationError, match="5.*JSON"):
            plugin.resolve(trained())

    @pytest.mark.parametrize(
        ("config", "fields", "message"),
        [
            ({**ZERO2, "comms_logger": {"verbose": "auto"}}, {}, 'hf_ds_config.*comms_logger.verbose: "auto"'),
            ({**ZERO2, "aio": {"sizes": ["auto", 0.9]}}, {}, 'aio.sizes.0: "auto"'),
            ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {}, "size: 3.*the 2 processes"),
            ({"zero_optimization": {"stage": 1, "zero_quantized_weights": "none"}}, {}, "quantized_weights.*neither"),
            *(
                (ZERO3, {f"offload_{kind}_device": "nvme"}, f"offload_{kind}.device: nvme .*--offload_{kind}_nvme_path")
                for kind in ("optimizer", "param")
            ),
        ],
        ids=str,
    )
    def test_what_is_refused(self, config: dict[str, Any], fields: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            resolve(config, **fields)

    def test_changes_by_the_script_are_checked(self, caplog: pytest.LogCaptureFixture) -> None:
        plugin = DeepSpeedPlugin(zero_stage=2)
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["offload_param"]["device"], zero["zero_quantized_weights"] = "cpu", True
        PartialState(cpu=True)
        resolved = plugin.resolve(trained())["zero_optimization"]
        assert (resolved["offload_param"]["device"], resolved["zero_quantized_weights"]) == ("none", False)
        assert "offload_param.device: cpu, which has no effect below ZeRO stage 3" in caplog.text
        zero["offload_param"]["device"] = "tape"
        with pytest.raises(ConfigurationError, match="offload_param.device: 'tape'"):
            plugin.resolve(trained())

    def test_a_dummy_scheduler_with_its_defaults_has_a_warm_up_of_one_step(self) -> None:
        """DeepSpeed refuses 0 steps from 0.19.6 on."""
        optimizer = DummyOptim([], lr=1.0)
        config = {
            **ZERO2,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        }
        done = resolve(config, trained(optimizer=optimizer, scheduler=DummyScheduler(optimizer)))
        assert done["scheduler"]["params"]["warmup_num_steps"] == 1


# -- any JSON, any settings -------------------------------------------------------------------------------------------


EXAMPLES: Any = {"max_examples": 300, "deadline": None, "derandomize": True}
EXAMPLES["suppress_health_check"] = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    """Missing, "auto" or one of the values; often missing, because most combinations contradict each other."""
    return st.sampled_from([None, None, None, None, "auto", "auto", *values])


def section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields).map(
        lambda made: {key: value for key, value in made.items() if value is not None}
    )


DEVICES = ("none", "cpu", "nvme")
JSONS = section(
    zero_optimization=section(
        stage=st.sampled_from(["auto", 0, 1, 2, 2, 3, 3, 3, 4, None]),
        offload_optimizer=section(device=maybe(*DEVICES), nvme_path=maybe("/a")),
        offload_param=section(device=maybe(*DEVICES), nvme_path=maybe("/a")),
        stage3_gather_16bit_weights_on_model_save=maybe(True, False),
        reduce_bucket_size=maybe(500),
        stage3_prefetch_bucket_size=maybe(0),
        zero_hpz_partition_size=maybe(1, 2, 3),
        zero_quantized_weights=maybe(True),
    ),
    train_batch_size=maybe(8, 24),
    train_micro_batch_size_per_gpu=maybe(2, 4),
    gradient_accumulation_steps=maybe(1, 3),
    gradient_clipping=maybe(0.0, 1.0),
    fp16=section(enabled=maybe(True, False)),
    bf16=section(enabled=maybe(True, False)),
    optimizer=st.sampled_from([None, None, ADAMW]),
    scheduler=st.sampled_from([None, None, DECAY]),
)
FIELDS = section(
    zero_stage=maybe(0, 1, 2, 3),
    gradient_accumulation_steps=maybe(1, 3),
    gradient_clipping=maybe(1.0),
    offload_optimizer_device=maybe(*DEVICES),
    offload_param_device=maybe(*DEVICES),
    offload_param_nvme_path=maybe("/a", "/b"),
    zero3_save_16bit_model=st.sampled_from([None, True, False]),
    zero3_init_flag=st.sampled_from([None, True, False]),
)
FACTS = st.builds(
    PreparedFacts,
    world_size=st.sampled_from([1, 2, 4]),
    mixed_precision=st.sampled_from(["no", "fp16", "bf16"]),
    micro_batch_sizes=st.sampled_from([(4,), (2, 8), (None,), ()]),
    gradient_accumulation_steps=st.sampled_from([1, 3]),
    model=st.sampled_from([MODEL, MODEL, None]),
    optimizer=st.sampled_from([None, torch.optim.SGD(MODEL.parameters(), lr=0.1), DummyOptim([])]),
    scheduler=st.sampled_from([None, None, DummyScheduler(None, 10, 2)]),
)


@settings(**EXAMPLES)
@given(config=st.none() | JSONS, fields=FIELDS, facts=FACTS)
def test_resolved_configurations_are_consistent(
    config: dict[str, Any] | None, fields: dict[str, Any], facts: PreparedFacts
) -> None:
    before, done = copy.deepcopy(config), None
    with contextlib.suppress(ConfigurationError):
        plugin = DeepSpeedPlugin(hf_ds_config=config, **fields)
        done = plugin.resolve(facts)
    assert config == before
    event("refused" if done is None else "consistent")
    if done is not None:
        check_consistent(done, facts)
        check_explicit_values_are_kept(done, config or {}, fields)
        assert plugin.zero_stage == done["zero_optimization"]["stage"]
        assert plugin.gradient_accumulation_steps == done[STEPS]
        assert plugin.resolve(facts) == done


BUCKETS = ("offload_param", "offload_optimizer", "reduce_bucket_size")
# Whatever JSON can hold, under the keys that matter.
JUNK = st.recursive(
    st.sampled_from([None, True, False, "auto", "none", "cpu", "AdamW", "", 0, 1, 3, -1, 1.5, 1e30]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["params", "type", "enabled", "device", "stage", "x"]), inner)
    ),
    max_leaves=4,
)
ANYTHING = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            (TRAIN, MICRO, STEPS, "gradient_clipping", "fp16", "bf16", "optimizer", "scheduler", "x"), JUNK
        ),
        "zero_optimization": JUNK
        | st.fixed_dictionaries(
            {"stage": st.sampled_from([1, 3])},
            optional=dict.fromkeys(
                (*BUCKETS, "zero_hpz_partition_size", "zero_quantized_weights"),
                JUNK,
            ),
        ),
    },
)


@settings(**EXAMPLES)
@given(config=ANYTHING, stage=st.sampled_from([None, 2]), facts=FACTS)
def test_any_json_raises_only_configuration_errors(
    config: dict[str, Any], stage: int | None, facts: PreparedFacts
) -> None:
    with contextlib.suppress(ConfigurationError):
        check_consistent(DeepSpeedPlugin(hf_ds_config=config, zero_stage=stage).resolve(facts), facts)  # type: ignore[arg-type]


def check_explicit_values_are_kept(done: dict[str, Any], config: dict[str, Any], fields: dict[str, Any]) -> None:
    for field, path in FILE_PATHS.items():
        for value in (fields.get(field), get_value(config, path)):
            off_at_stage = path.endswith(".device") and get_value(done, path) == "none"
            assert value in (None, "auto") or get_value(done, path) == value or off_at_stage
    for key in (TRAIN, MICRO):
        assert config.get(key) in (None, "auto", done[key])


def check_consistent(done: dict[str, Any], facts: PreparedFacts) -> None:
    assert done[TRAIN] == done[MICRO] * done[STEPS] * facts.world_size
    assert list(auto_paths(done)) == [] and json.dumps({**done, "steps_per_print": 0})
    zero = done["zero_optimization"]
    stage = zero["stage"]
    assert stage in (0, 1, 2, 3) and facts.world_size % zero.get("zero_hpz_partition_size", 1) == 0
    assert get_value(zero, "offload_param.device", "none") == "none" or stage == 3
    assert get_value(zero, "offload_optimizer.device", "none") == "none" or stage > 0
    assert not zero.get("zero_quantized_weights") or stage == 3
    for kind in ("param", "optimizer"):
        assert get_value(zero, f"offload_{kind}.device") != "nvme" or zero[f"offload_{kind}"]["nvme_path"]
    enabled = [name for name in ("fp16", "bf16") if done[name]["enabled"]]
    assert len(enabled) < 2 and (facts.mixed_precision == "no" or enabled == [facts.mixed_precision])
    assert ("optimizer" in done) == isinstance(facts.optimizer, DummyOptim) and ("scheduler" in done) == (
        facts.scheduler is not None
    )
    assert done.get("gradient_clipping", 0.0) < math.inf
