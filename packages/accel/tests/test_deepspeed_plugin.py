"""DeepSpeedPlugin: settings from code, from the launcher's variables and from JSON, and errors."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DeepSpeedPlugin
from accel.deepspeed import runtime
from accel.state import deepspeed_required
from accel.utils import GatheredParameters, compile_regions_deepspeed, has_compiled_regions
from accel.utils.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin
from accel_launch.config.read import load_settings
from accel_state import AcceleratorState
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.options import DeepSpeedOptions
from accel_state.options.deepspeed import FILE_PATHS, check_deepspeed_file


def recipe(enabled: Any, stage: Any, saves: Any, device: str, clipping: Any, steps: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": saves}
    zero |= {"offload_optimizer": {"device": device}, "offload_param": {"device": device}}
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": steps}
    counts = {"gradient_clipping": clipping, **sizes, "steps_per_print": 2000000}
    return {"bf16": {"enabled": enabled}, "zero_optimization": zero, **counts}


CONCRETE = recipe(True, 3, False, "none", 1.0, 10)
AUTOMATIC = recipe("auto", "auto", "auto", "auto", "auto", "auto")
ZERO3 = {"zero_optimization": {"stage": 3}}
PREFIX = "ACCELERATE_DEEPSPEED_"

# Variables of the launcher, and the resulting fields and configuration values of the plugin.
LAUNCHED: list[tuple[dict[str, str], dict[str, Any]]] = [
    (
        {},
        {
            "zero_stage": 2,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "offload_optimizer_device": "none",
            "offload_optimizer_nvme_path": "none",
            "zero3_init_flag": False,
            "zero_optimization.offload_optimizer.device": "none",
            "zero_optimization.offload_optimizer.nvme_path": None,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        },
    ),
    ({f"{PREFIX}ZERO_STAGE": "3"}, {"zero_stage": 3, "zero3_init_flag": True, "steps_per_print": math.inf}),
    ({f"{PREFIX}ZERO_STAGE": "3", f"{PREFIX}ZERO3_INIT": "false"}, {"zero_stage": 3, "zero3_init_flag": False}),
    (
        {f"{PREFIX}ZERO_STAGE": "3", f"{PREFIX}ZERO3_SAVE_16BIT_MODEL": "true"},
        {"zero3_save_16bit_model": True, "zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
    ),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 4}),
    ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"gradient_clipping": 0.5}),
    (
        {f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE": "nvme", f"{PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH": "/drive"},
        {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/drive"}},
    ),
    (
        {
            f"{PREFIX}ZERO_STAGE": "3",
            f"{PREFIX}OFFLOAD_PARAM_DEVICE": "nvme",
            f"{PREFIX}OFFLOAD_PARAM_NVME_PATH": "/drive",
        },
        {"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/drive"}},
    ),
    ({f"{PREFIX}MOE_LAYER_CLS_NAMES": "A,B"}, {"transformer_moe_cls_names": "A,B"}),
]


@pytest.mark.parametrize(("variables", "expected"), LAUNCHED, ids=str)
def test_launcher_variables(variables: dict[str, str], expected: dict[str, Any]) -> None:
    with patch_environment(**variables):
        plugin = DeepSpeedPlugin()
    for name, value in expected.items():
        path = FILE_PATHS.get(name, name)
        if name in plugin.__dataclass_fields__:
            assert getattr(plugin, name) == value
        if "." in path or path == name not in plugin.__dataclass_fields__:
            assert plugin.get_value(path) == (None if path.endswith("nvme_path") and value == "none" else value)


def test_every_variable_of_the_launcher_changes_the_plugin() -> None:
    read = {name for variables, _ in LAUNCHED for name in variables} | {"ACCELERATE_DEEPSPEED_CONFIG_FILE"}
    assert {opt.env for opt in DeepSpeedOptions.options() if opt.exported} <= read


def test_code_wins_over_the_launcher() -> None:
    with patch_environment(ACCELERATE_DEEPSPEED_ZERO_STAGE="2", ACCELERATE_GRADIENT_CLIPPING="0.5"):
        plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping="auto")
    assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 0.5)


def as_object(config: dict[str, Any]) -> Any:
    return type("TrainerConfig", (), {"config": config})()


class TestJson:
    def test_all_forms_are_equivalent(self, tmp_path: Path) -> None:
        text, path, held = json.dumps(CONCRETE), tmp_path / "ds.json", as_object(copy.deepcopy(CONCRETE))
        path.write_text(text)
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        for form in (str(path), path, CONCRETE, encoded, encoded.rstrip("="), held, HfDeepSpeedConfig(CONCRETE)):
            plugin = DeepSpeedPlugin(hf_ds_config=form)
            assert plugin.deepspeed_config == {**CONCRETE, "steps_per_print": math.inf}
            assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (3, 10, 1.0)
            assert plugin.zero3_init_flag and not plugin.zero3_save_16bit_model and plugin.precision == "bf16"
            assert plugin.hf_ds_config.config is plugin.deepspeed_config
        # Its owner reads from it: it is changed in place, and dictionaries are not.
        assert held.config["steps_per_print"] == math.inf and CONCRETE["steps_per_print"] == 2000000

    def test_auto_takes_the_value_of_code_or_launcher_or_the_default(self) -> None:
        settings = {"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": "nvme"}
        with patch_environment(ACCELERATE_GRADIENT_CLIPPING="1.0", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="5"):
            plugin = DeepSpeedPlugin(hf_ds_config=AUTOMATIC, zero3_save_16bit_model=True, **settings)
        expected = recipe("auto", 3, True, "nvme", 1.0, 5) | {"steps_per_print": math.inf}
        expected["zero_optimization"]["offload_param"]["device"] = "cpu"
        assert plugin.deepspeed_config == expected and plugin.accumulation_steps == 5
        plugin = DeepSpeedPlugin(hf_ds_config=AUTOMATIC)
        assert plugin.zero_stage == 2 and plugin.offload_param_device == plugin.offload_optimizer_device == "none"
        assert plugin.accumulation_steps is None and plugin.is_auto("gradient_clipping")
        assert not plugin.is_auto("no.such.key")

    def test_the_launchers_file(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(CONCRETE))
        with patch_environment(ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)):
            assert DeepSpeedPlugin().zero_stage == 3
            plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
            path.unlink()
            with pytest.raises(ConfigurationError, match=r"ACCELERATE_DEEPSPEED_CONFIG_FILE=.*ds\.json: No"):
                DeepSpeedPlugin()
        assert plugin.zero_stage == 1
        AcceleratorState(cpu=True)
        plugin.select(_from_accelerator_state=True)
        assert f"hf_ds_config of the script overrides {path} of the launcher." in caplog.text

    def test_a_field_that_overrides_the_launchers_value_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        AcceleratorState(cpu=True)
        with patch_environment(ACCELERATE_GRADIENT_CLIPPING="0.5", ACCELERATE_DEEPSPEED_ZERO_STAGE="3"):
            DeepSpeedPlugin(gradient_clipping=0.5, zero_stage=3).select(_from_accelerator_state=True)
            assert "overrides" not in caplog.text
            plugin = DeepSpeedPlugin(gradient_clipping=1.0, zero_stage=3)
        plugin.select(_from_accelerator_state=True)
        assert plugin.deepspeed_config["gradient_clipping"] == 1.0
        override = "(gradient_clipping=1.0) overrides environment variable ACCELERATE_GRADIENT_CLIPPING=0.5"
        assert len(caplog.records) == 1
        assert override in caplog.text

    @pytest.mark.parametrize(
        ("form", "message"),
        [
            (5, "hf_ds_config=5 is not a DeepSpeed configuration"),
            ("/no/such/file.json", "'/no/such/file.json' is neither the path"),
            ("%%%", "neither the path"),
            (base64.b64encode(b"[1, 2]").decode(), "decodes to a JSON list"),
            (base64.b64encode(b'{"a": 1, "a": 2}').decode(), "'a' is given twice, as 1 and 2"),
            ("a" * 5000, "aaa... is neither|neither the path"),
            (b"{", "ds.json.*not valid JSON"),
            (b"[1]", "ds.json.* is a JSON object, not list"),
            (b'{"a": {"b": 1, "b": 2}}', "ds.json.*the key 'b' is given twice"),
        ],
    )
    def test_invalid_forms_and_files(self, tmp_path: Path, form: Any, message: str) -> None:
        if isinstance(form, bytes):
            (tmp_path / "ds.json").write_bytes(form)
            form = str(tmp_path / "ds.json")
        with pytest.raises(ConfigurationError, match=message):
            DeepSpeedPlugin(hf_ds_config=form)


# One value of each setting that a JSON may have, and another one for the plugin.
OTHERS: dict[str, tuple[Any, Any]] = {
    "gradient_accumulation_steps": (10, 5),
    "gradient_clipping": (1.0, 2.0),
    "zero_stage": (3, 2),
    "offload_optimizer_device": ("cpu", "none"),
    "offload_param_device": ("cpu", "nvme"),
    "offload_optimizer_nvme_path": ("/a", "/b"),
    "offload_param_nvme_path": ("/a", "/b"),
    "zero3_save_16bit_model": (False, True),
}


class TestConflicts:
    def test_all_settings_are_covered(self) -> None:
        assert set(OTHERS) == set(FILE_PATHS)

    @pytest.mark.parametrize("field", OTHERS)
    def test_a_setting_and_the_json(self, field: str) -> None:
        """From code or from the launcher; an equal value is no conflict."""
        inside, outside = OTHERS[field]
        config: Any = copy.deepcopy(ZERO3)
        *sections, key = FILE_PATHS[field].split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = inside
        assert getattr(DeepSpeedPlugin(hf_ds_config=config, **{field: inside}), field) == inside
        env = f"ACCELERATE_{field.upper()}" if field.startswith("gradient") else f"{PREFIX}{field.upper()}"
        text = "true" if outside is True else str(outside)
        for variables, given, source in (
            ({}, {field: outside}, f"DeepSpeedPlugin({field}={outside!r})"),
            ({env: text}, {}, f"environment variable {env}={text}"),
        ):
            with patch_environment(**variables), pytest.raises(ConfigurationError) as caught:
                DeepSpeedPlugin(hf_ds_config=config, **given)
            message = f"{source}, but hf_ds_config has {FILE_PATHS[field]}: {json.dumps(inside)}"
            assert message in str(caught.value)


IGNORED = (
    "When using `deepspeed_config_file`, the following accel config variables will be ignored: "
    "['gradient_accumulation_steps', 'gradient_clipping', 'zero_stage', 'offload_optimizer_device', "
    "'offload_param_device', 'zero3_save_16bit_model', 'mixed_precision']. Please specify them appropriately in "
    "the DeepSpeed config file."
)
TAMPERED = (
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n"
    "  offload_optimizer_device: cpu\n  offload_param_device: cpu\n  zero3_init_flag: true\n"
    "  zero3_save_16bit_model: true\n  zero_stage: 3\n  deepspeed_config_file: ds_config.json\nnum_processes: 2\n"
)


def test_both_files_set_the_same_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide has it; the launcher refuses it, and so does the plugin where the launcher set no variables."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(TAMPERED)
    Path("ds_config.json").write_text(json.dumps(CONCRETE))
    with pytest.raises(ConfigurationError) as caught:
        check_deepspeed_file(load_settings({"config_file": "config.yaml"}, environ={}))
    assert str(caught.value).startswith(IGNORED)
    place = "deepspeed_config.zero_stage: 3 in config.yaml, line 9, ds_config.json has zero_optimization.stage: 3"
    assert place in str(caught.value) and "`accel config`" in str(caught.value)
    names = "ZERO_STAGE=3 OFFLOAD_OPTIMIZER_DEVICE=cpu OFFLOAD_PARAM_DEVICE=cpu ZERO3_SAVE_16BIT_MODEL=true"
    words = [f"{PREFIX}{word}" for word in (*names.split(), "ZERO3_INIT=true", "CONFIG_FILE=ds_config.json")]
    words += ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1", "ACCELERATE_GRADIENT_CLIPPING=1.0"]
    variables = dict(word.split("=") for word in words)
    with patch_environment(**variables), pytest.raises(ConfigurationError) as caught:
        DeepSpeedPlugin()
    message = str(caught.value)
    assert message.startswith(IGNORED) and "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1, " in message
    assert "ds_config.json has gradient_accumulation_steps: 10" in message and "the file enables bf16" in message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 7}, r"zero_stage=7\): '7' is not one of 0, 1, 2, 3"),
    ({"offload_param_device": "disk"}, "'disk' is not one of none, cpu, nvme"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0"),
    ({"zero3_init_flag": "perhaps"}, "'perhaps' is neither true nor false"),
    ({"enable_msamp": True}, "enable_msamp=True"),
    ({"msamp_opt_level": "O3"}, "msamp_opt_level='O3' is not one of O1, O2"),
    ({"hf_ds_config": {"train_batch_size": 8}}, "does not set the ZeRO stage"),
    ({"hf_ds_config": {"zero_optimization": True}}, "zero_optimization: True, which must be a JSON object"),
    ({"hf_ds_config": {"zero_optimization": True}, "zero_stage": 2}, "zero_optimization: True"),
    ({"hf_ds_config": {"zero_optimization": None}}, "zero_optimization is None"),
    ({"hf_ds_config": {**ZERO3, "optimizer": "AdamW"}}, "optimizer: 'AdamW', which must be a JSON object"),
    ({"hf_ds_config": {"zero_optimization": {}}}, "does not set the ZeRO stage"),
    ({"hf_ds_config": {"zero_optimization": {"stage": 4}}}, "zero_optimization.stage: 4"),
    ({"hf_ds_config": {"zero_optimization": {"stage": True}}}, "stage: True"),
    ({"hf_ds_config": {**ZERO3, "gradient_acumulation_steps": 2}}, "Did you mean 'gradient_accumulation_steps'"),
    ({"hf_ds_config": {"zero_optimisation": {"stage": 2}, **ZERO3}}, "Did you mean 'zero_optimization'"),
    ({"hf_ds_config": {**ZERO3, "train_batch_size": 0}}, "train_batch_size: 0, .*an integer of at least 1"),
    ({"hf_ds_config": {**ZERO3, "train_micro_batch_size_per_gpu": 1.5}}, "train_micro_batch_size_per_gpu: 1.5"),
    ({"hf_ds_config": {**ZERO3, "gradient_accumulation_steps": True}}, "gradient_accumulation_steps: True"),
    ({"hf_ds_config": {**ZERO3, "gradient_clipping": "much"}}, "gradient_clipping: 'much', .*a number of at least 0"),
    ({"hf_ds_config": {**ZERO3, "gradient_clipping": math.inf}}, "gradient_clipping: inf"),
    ({"hf_ds_config": {**ZERO3, "fp16": {"enabled": True}, "bf16": {"enabled": True}}}, "only one may be enabled"),
    ({"hf_ds_config": {**ZERO3, "optimizer": {"params": {}}}}, '"optimizer" without a "type", such as AdamW'),
    ({"hf_ds_config": {**ZERO3, "scheduler": {}}}, '"scheduler" without a "type", such as WarmupLR'),
    ({"hf_ds_config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}}, "device: 'disk'"),
    ({"hf_ds_config": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}}, "hpz_partition_size: 0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DeepSpeedPlugin(**fields)


def test_zero_plus_plus_and_unknown_keys_are_accepted() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, "a_key_of_next_year": {"x": 1}})
    assert plugin.deepspeed_config["zero_optimization"] == zero and plugin.get_value("a_key_of_next_year.x") == 1


def test_zero3_init_without_stage_3_is_disabled_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with patch_environment(ACCELERATE_DEEPSPEED_ZERO3_INIT="true"):
        mine, launched = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True), DeepSpeedPlugin(zero_stage=1)
    assert not mine.zero3_init_flag and not launched.zero3_init_flag and not caplog.records
    state = AcceleratorState(cpu=True, deepspeed_plugin={"mine": mine, "launched": launched})
    with caplog.at_level(logging.INFO):
        for name in ("mine", "launched", "mine"):
            state.select_deepspeed_plugin(name)
    assert [(record.levelname, record.message.split(":")[0]) for record in caplog.records] == [
        ("WARNING", "[RANK 0] DeepSpeedPlugin(zero3_init_flag=True) has no effect with ZeRO stage 2"),
        ("INFO", "[RANK 0] environment variable ACCELERATE_DEEPSPEED_ZERO3_INIT=true has no effect with ZeRO stage 1"),
    ]


def test_settings_without_effect_at_the_stage_are_turned_off_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}, "zero_hpz_partition_size": 2}
    given: list[tuple[dict[str, Any], list[str]]] = [
        ({"zero_stage": 2, "offload_param_device": "cpu"}, ["offload_param.device: cpu, which has no effect"]),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, ["offload_optimizer.device: cpu, which has no effect"]),
        ({"zero_stage": 2, "transformer_moe_cls_names": "Experts"}, ["transformer_moe_cls_names='Experts'"]),
        ({"hf_ds_config": {"zero_optimization": zero}}, ["offload_param.device: cpu", "zero_hpz_partition_size: 2"]),
    ]
    AcceleratorState(cpu=True)
    for settings, messages in given:
        caplog.clear()
        plugin = DeepSpeedPlugin(**settings)
        plugin.select(_from_accelerator_state=True)
        assert plugin.offload_param_device == plugin.offload_optimizer_device == "none"
        assert len(caplog.records) == len(messages) and all(text in caplog.text for text in messages)


def test_accumulation_steps_that_nothing_sets_are_1_to_readers_only() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1
    assert plugin.accumulation_steps is None, "the Accelerator's number counts"
    plugin.deepspeed_config["gradient_accumulation_steps"] = 4
    assert plugin.accumulation_steps == 4


def test_dataclasses_replace() -> None:
    plugin = dataclasses.replace(DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0), zero3_init_flag=False)
    found = (plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag, plugin.strategy)
    assert found == (3, 1.0, False, "deepspeed")


# Precision of the Accelerator, what the JSON has, and what becomes of it: fp16 and bf16.
FP16 = {"enabled": True, "auto_cast": True}
ON, OFF, AUTO = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}
PRECISIONS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("no", {}, OFF, OFF),
    ("no", {"bf16": AUTO}, OFF, OFF),
    ("no", {"fp16": ON}, ON, OFF),
    ("no", {"bf16": ON}, OFF, ON),
    ("fp16", {}, FP16, OFF),
    ("fp16", {"bf16": AUTO}, FP16, OFF),
    ("fp16", {"fp16": AUTO, "bf16": AUTO}, ON, OFF),
    ("bf16", {}, OFF, ON),
    ("bf16", {"fp16": AUTO, "bf16": AUTO}, OFF, ON),
    ("bf16", {"bf16": ON}, OFF, ON),
    ("fp8", {"fp16": AUTO}, OFF, ON),
]


class TestPrecision:
    @pytest.mark.parametrize(("precision", "sections", "fp16", "bf16"), PRECISIONS, ids=str)
    def test_the_configuration_and_the_accelerator(
        self, precision: str, sections: dict[str, Any], fp16: Any, bf16: Any
    ) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config={**ZERO3, **copy.deepcopy(sections)})
        plugin.set_mixed_precision(precision)
        assert (plugin.deepspeed_config["fp16"], plugin.deepspeed_config["bf16"]) == (fp16, bf16)
        assert plugin.precision == next((name for name in sections if sections[name] == ON), None)

    @pytest.mark.parametrize(
        ("precision", "sections", "message"),
        [
            ("fp16", {"bf16": ON}, "mixed_precision='fp16'.*bf16.enabled: true"),
            ("bf16", {"fp16": ON}, "mixed_precision='bf16'.*fp16.enabled: true"),
            ("fp8", {"fp16": ON}, "mixed_precision='fp8'.*fp16.enabled: true"),
            ("bf16", {"bf16": OFF}, "mixed_precision='bf16'.*hf_ds_config.*bf16.enabled: false"),
            ("fp61", {}, "mixed_precision='fp61'.*fp16, bf16, fp8"),
        ],
    )
    def test_contradictions(self, precision: str, sections: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            DeepSpeedPlugin(hf_ds_config={**ZERO3, **sections}).set_mixed_precision(precision)

    @pytest.mark.parametrize(
        ("argument", "launched", "message"),
        [
            ("no", None, "mixed_precision='no' contradicts DeepSpeedPlugin, whose configuration enables bf16"),
            ("fp16", "bf16", "mixed_precision='fp16' contradicts"),
            (None, "fp16", "environment variable ACCELERATE_MIXED_PRECISION=fp16 contradicts DeepSpeedPlugin"),
        ],
    )
    def test_the_accelerator_requests_another_precision(self, argument: Any, launched: Any, message: str) -> None:
        plugins = {"first": DeepSpeedPlugin(hf_ds_config=CONCRETE), "second": DeepSpeedPlugin()}
        with (
            patch_environment(**({"ACCELERATE_MIXED_PRECISION": launched} if launched else {})),
            pytest.raises(ConfigurationError, match=message),
        ):
            Accelerator(cpu=True, mixed_precision=argument, deepspeed_plugins=plugins)

    def test_a_second_accelerator_may_choose_another_one(self) -> None:
        plugin = DeepSpeedPlugin()
        for precision in ("bf16", "no", "fp16"):
            plugin.set_mixed_precision(precision)
        assert plugin.get_value("fp16.enabled") is True and plugin.get_value("bf16.enabled") is False


class TestProcessing:
    """The functions with which other libraries fill in "auto" values."""

    def test_one_value(self) -> None:
        plugin, lines = DeepSpeedPlugin(hf_ds_config=CONCRETE), []
        plugin.fill_match("gradient_clipping", lines, **{"gradient_clipping": 2.0})
        plugin.fill_match("gradient_clipping", lines, must_match=False, **{"gradient_clipping": 2.0})
        plugin.fill_match("no.such.key", lines, **{"no.such.key": 1})
        assert lines == ["- ds gradient_clipping=1.0 vs arg gradient_clipping=2.0"]
        with pytest.raises(ConfigurationError, match="`train_batch_size` not found in kwargs"):
            plugin.fill_match("train_batch_size")
        plugin.fill_match("train_batch_size", **{"train_batch_size": 8})
        assert plugin.deepspeed_config["train_batch_size"] == 8

    def test_the_whole_configuration(self) -> None:
        params = {"lr": "auto", "eps": 1e-8}
        plugin = DeepSpeedPlugin(hf_ds_config={**ZERO3, "optimizer": {"type": "AdamW", "params": params}})
        values = {"optimizer.params.lr": 0.1, "zero_optimization.stage": 3}
        plugin.deepspeed_config_process(**values)
        assert plugin.get_value("optimizer.params.lr") == 0.1
        with pytest.raises(ConfigurationError, match="optimizer.params.lr=0.1.*optimizer.params.lr=0.2"):
            plugin.deepspeed_config_process(**{**values, "optimizer.params.lr": 0.2})
        plugin.deepspeed_config_process(must_match=False, **{**values, "optimizer.params.lr": 0.2})
        lines: list[str] = []
        other = {"optimizer.params.lr": 0.3, "zero_optimization.stage": 1}
        plugin.deepspeed_config_process("optimizer.", lines, plugin.deepspeed_config["optimizer"], **other)
        assert lines == ["- ds optimizer.params.lr=0.1 vs arg optimizer.params.lr=0.3"]


class TestHfDeepSpeedConfig:
    def test_queries(self) -> None:
        config = HfDeepSpeedConfig({**CONCRETE, "a": {"b": {"yes": 1, "no": 0, "nothing": None}}})
        assert config.is_zero3() and not config.is_zero2() and not config.is_offload()
        assert config.get_value("a.b.yes") == 1 and config.get_value("a.x.yes", "other") == "other"
        assert config.find_config_node("a.b.yes") == (config.config["a"]["b"], "yes")
        assert config.find_config_node("gradient_clipping") == (config.config, "gradient_clipping")
        assert config.find_config_node("x.y") == (None, "y")
        assert config.is_true("a.b.yes") and not config.is_true("a.b.no") and not config.is_true("a.b.missing")
        assert config.is_false("a.b.no") and not config.is_false("a.b.yes") and not config.is_false("a.b.missing")
        assert not config.is_false("a.b.nothing")
        with pytest.raises(ConfigurationError, match=r"HfDeepSpeedConfig\(None\)"):
            HfDeepSpeedConfig(None)

    def test_changes(self) -> None:
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}, "bf16": ON})
        config.config["zero_optimization"] = {"stage": 3, "offload_param": {"device": "nvme"}}
        assert config.is_zero2()
        config.set_stage_and_offload()
        assert config.is_zero3() and config.is_offload()
        config.del_config_sub_tree("zero_optimization.offload_param")
        config.del_config_sub_tree("x.y")
        assert config.config["zero_optimization"] == {"stage": 3}
        with pytest.raises(ConfigurationError, match="x.y.*zero_optimization, bf16"):
            config.del_config_sub_tree("x.y", must_exist=True)


class TestSelection:
    def test_plugins_are_selected_through_the_state(self) -> None:
        plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=2)}
        state = AcceleratorState(cpu=True, deepspeed_plugin=plugins)
        with pytest.raises(ConfigurationError, match=r"select_deepspeed_plugin\(name\)"):
            plugins["student"].select()
        with pytest.raises(ConfigurationError, match="selected=True cannot be set"):
            plugins["student"].selected = True
        with pytest.raises(ConfigurationError, match="no active DeepSpeedPlugin"):
            get_active_deepspeed_plugin(state)
        state.select_deepspeed_plugin("teacher")
        assert get_active_deepspeed_plugin(state) is plugins["teacher"] is state.deepspeed_plugin
        assert [plugin.selected for plugin in plugins.values()] == [False, True]
        state.select_deepspeed_plugin("student")
        assert [plugin.selected for plugin in plugins.values()] == [True, False]

    def test_deepspeed_required(self) -> None:
        @deepspeed_required
        def stage() -> int:
            return AcceleratorState().deepspeed_plugin.zero_stage if AcceleratorState._shared_state else -1

        assert stage() == -1 and stage.__name__ == "stage"
        AcceleratorState(cpu=True)
        with pytest.raises(ConfigurationError, match="NO.*--use_deepspeed"):
            stage()
        AcceleratorState._reset_state()
        AcceleratorState(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
        assert stage() == 1

    def test_gathering_unsharded_parameters_does_nothing(self) -> None:
        model = nn.Linear(2, 2)
        for given in (model, list(model.parameters()), model.weight):
            with GatheredParameters(given, modifier_rank=0) as nothing, torch.no_grad():
                assert nothing is None and model.weight.numel() == 4


def test_regions_are_compiled_in_place() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ReLU())
    assert compile_regions_deepspeed(model, backend="eager") is None and has_compiled_regions(model)


class TestTransformers:
    """Transformers creates sharded models while a stage 3 configuration is alive."""

    @pytest.fixture
    def enabled(self) -> Any:
        pytest.importorskip("transformers")
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        yield is_deepspeed_zero3_enabled
        runtime.disable_sharded_init()

    def test_as_long_as_the_plugin_is_selected(self, enabled: Any) -> None:
        from transformers.integrations.deepspeed import deepspeed_config

        plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
        state = AcceleratorState(cpu=True, deepspeed_plugin=plugins)
        for name, stage in (("student", 2), ("teacher", 3), ("student", 2), ("teacher", 3)):
            state.select_deepspeed_plugin(name)
            assert enabled() == (stage == 3) and deepspeed_config()["zero_optimization"]["stage"] == stage
        with plugins["teacher"].zero3_init_context_manager(enable=False):
            assert not enabled() and not plugins["teacher"].is_zero3_init_enabled()
        assert enabled() and plugins["teacher"].is_zero3_init_enabled()
        plugins["teacher"].release()
        assert not enabled() and deepspeed_config() is None and plugins["teacher"].selected
        state.select_deepspeed_plugin("teacher")
        assert enabled()
        del plugins, state
        AcceleratorState._reset_state()
        assert not enabled()

    def test_a_configuration_set_by_the_script_is_kept(self, enabled: Any) -> None:
        from transformers.integrations.deepspeed import set_hf_deepspeed_config

        own = type("OwnConfig", (), {"config": {}, "is_zero3": lambda self: True})()
        set_hf_deepspeed_config(own)
        DeepSpeedPlugin(zero_stage=2).select(_from_accelerator_state=True)
        assert enabled()
        del own
        assert not enabled()

    def test_switched_off(self, enabled: Any) -> None:
        plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
        plugin.select(_from_accelerator_state=True)
        assert not enabled()
        with plugin.zero3_init_context_manager(enable=True):
            assert enabled()
        assert not enabled()

    def test_what_transformers_reads(self, enabled: Any) -> None:
        from transformers.integrations.deepspeed import deepspeed_config

        config = {**CONCRETE, "train_batch_size": 40, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
        config["zero_optimization"] = {**CONCRETE["zero_optimization"], "reduce_bucket_size": "auto"}
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        plugin.set_deepspeed_weakref()
        read = deepspeed_config()
        assert (read["gradient_accumulation_steps"], read["train_micro_batch_size_per_gpu"]) == (10, 1)
        assert "train_batch_size" not in read
        assert read["bf16"] == {"enabled": True} and '"auto"' not in json.dumps({**read, "steps_per_print": 0})
        assert plugin.is_auto("zero_optimization.reduce_bucket_size") and plugin.config == read
