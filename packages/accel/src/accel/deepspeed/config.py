"""Reading a DeepSpeed configuration, and merging it with the settings of the script and of the launcher."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, DeepSpeedOptions
from accel_state.options.config_file import expand
from accel_state.options.declaration import Option, read_variable
from accel_state.options.deepspeed import FILE_PATHS, both_set, read_deepspeed_file, without_duplicates

from .config_paths import AUTO, MISSING, copy_config, delete_value, get_value, leaf_paths, set_value
from .validation import check_section_types


@dataclass(frozen=True, kw_only=True)
class PreparedFacts:
    """What ``DeepSpeedPlugin.resolve`` derives "auto" values from."""

    world_size: int
    mixed_precision: str = "no"
    # Samples per process and batch of each loader prepared with the model; None for a loader without a batch size.
    micro_batch_sizes: tuple[int | None, ...] = ()
    # The same for what was prepared earlier; used for a model without a loader.
    known_micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1  # the Accelerator's
    model: Any = None  # only its config is read, for the hidden size
    optimizer: Any = None  # as passed to prepare; None for a model that is not trained
    scheduler: Any = None
    # Scheduler steps per optimizer step in the script; the step counts of a DummyScheduler are divided by it.
    scheduler_steps_per_step: int = 1


# Plugin fields whose launcher option has another name.
_OPTION_NAMES = {"transformer_moe_cls_names": "moe_layer_cls_names"}
# Values of plugin fields that mean "not set", besides None and "auto".
_UNSET = {"offload_optimizer_nvme_path": "none", "offload_param_nvme_path": "none"}
_OPTIONS: dict[str, Option] = {opt.field: opt for group in (CoreOptions, DeepSpeedOptions) for opt in group.options()}


class Setting(NamedTuple):
    """A setting made outside of the JSON: its value, where it was set (for messages), and whether by the launcher."""

    value: Any
    source: str
    by_launcher: bool


class ConfigSource(NamedTuple):
    """A JSON configuration, its name for messages, and whether the launcher named it."""

    config: dict[str, Any]
    name: str
    by_launcher: bool = False


def explicit_setting(field: str, value: Any) -> Setting | None:
    """Return the value of a plugin field as set in the script (``value``) or else by the launcher.

    None if neither set it.
    """
    opt = _OPTIONS[_OPTION_NAMES.get(field, field)]
    if value is not None and value not in (AUTO, _UNSET.get(field, AUTO)):
        source = f"DeepSpeedPlugin({field}={value!r})"
        return Setting(opt.parse(value, source), source, by_launcher=False)
    launched = read_variable(opt)
    if launched is None:
        return None
    return Setting(launched, f"environment variable {opt.env}={opt.format(launched)}", by_launcher=True)


def read_config(source: Any, launcher_file: str | None) -> ConfigSource:
    """Read ``hf_ds_config`` in any of its forms, or else the file that the launcher names.

    Without either, every known setting is "auto".
    """
    if source is None and launcher_file is None:
        config: dict[str, Any] = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
        for path in FILE_PATHS.values():
            set_value(config, path, AUTO)
        return ConfigSource(config, "DeepSpeedPlugin")
    if source is None:
        where = f"environment variable {_OPTIONS['config_file'].env}={launcher_file}"
        return ConfigSource(read_deepspeed_file(str(launcher_file), where), str(launcher_file), by_launcher=True)
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        try:
            is_file = expand(text).is_file()
        except OSError:
            is_file = False  # base64 text can be longer than a file name may be
        if is_file:
            return ConfigSource(read_deepspeed_file(text, f"hf_ds_config={text!r}"), text)
        return ConfigSource(_decode_base64(text), "hf_ds_config (base64)")
    if isinstance(source, Mapping):
        return ConfigSource(copy_config(source), "hf_ds_config")
    held = getattr(source, "config", None)
    if isinstance(held, dict):
        # Not copied: the owner of the object (such as the Trainer of Transformers) keeps reading from it.
        return ConfigSource(held, "hf_ds_config")
    raise ConfigurationError(
        f"hf_ds_config={source!r} is not a DeepSpeed configuration. Pass the path of a JSON file, a dictionary, the "
        "JSON in base64, or an object with a dictionary as its .config, such as HfDeepSpeedConfig."
    )


def _decode_base64(text: str) -> dict[str, Any]:
    shown = text if len(text) <= 200 else text[:60] + "..."
    try:
        content = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode("utf-8")
        config = json.loads(content, object_pairs_hook=without_duplicates)
    except ConfigurationError:
        raise
    except (binascii.Error, ValueError, RecursionError):
        raise ConfigurationError(
            f"hf_ds_config={shown!r} is neither the path of an existing file nor a JSON object in base64."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"hf_ds_config={shown!r} decodes to a JSON {type(config).__name__}; a DeepSpeed configuration is an object."
        )
    return config


# fp8 layers compute in bf16 where they are not replaced.
_PRECISION_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16", "no": None}


def enabled_precision(config: Mapping[str, Any]) -> str | None:
    """Return the precision that the configuration enables: "fp16", "bf16" or None."""
    return next((name for name in ("fp16", "bf16") if get_value(config, f"{name}.enabled") is True), None)


def apply_mixed_precision(config: dict[str, Any], mixed_precision: str, name: str) -> None:
    """Enable a precision, in place, unless the configuration already sets one; "no" keeps what it has."""
    if mixed_precision not in _PRECISION_SECTIONS:
        allowed = ", ".join(_PRECISION_SECTIONS)
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of {allowed}.")
    wanted, enabled = _PRECISION_SECTIONS[mixed_precision], enabled_precision(config)
    contradiction = ""
    if wanted is not None and enabled not in (None, wanted):
        contradiction = f"{enabled}.enabled: true"
    elif wanted is not None and get_value(config, f"{wanted}.enabled") is False:
        contradiction = f"{wanted}.enabled: false"
    if contradiction:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}, but {name} has {contradiction}. Remove mixed_precision (or "
            f'--mixed_precision), or write "{AUTO}" in the configuration.'
        )
    target = wanted or enabled
    if target is not None:
        new_section = {"enabled": True, "auto_cast": True} if target == "fp16" else {}
        config.setdefault(target, new_section)["enabled"] = True
    for other in ("fp16", "bf16"):
        if other != target:
            config.setdefault(other, {})["enabled"] = False


class FilledValues:
    """Remembers a configuration before "auto" values were filled in, so that the next model has them filled in anew."""

    def __init__(self) -> None:
        self._original: Mapping[str, Any] = {}
        self._filled: Mapping[str, Any] = {}

    def revert(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration before values were filled in, with all changes that were made since."""
        reverted: dict[str, Any] = copy_config(self._original)
        for path in dict.fromkeys((*leaf_paths(self._filled), *leaf_paths(config))):
            value = get_value(config, path, MISSING)
            if value is MISSING:
                delete_value(reverted, path)
            elif value != get_value(self._filled, path, MISSING):
                set_value(reverted, path, copy_config(value))
        return reverted

    def fill(self, config: dict[str, Any], original: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
        """Replace the values of ``config`` by those of ``resolved``, in place."""
        for path in leaf_paths(resolved):
            set_value(config, path, copy_config(get_value(resolved, path)))
        for path in leaf_paths(original):
            # A whole section can be missing for this model only, such as the "optimizer" if it is not trained.
            if get_value(resolved, path, MISSING) is MISSING and path.split(".")[0] in resolved:
                delete_value(config, path)
        self._original, self._filled = original, copy_config(config)


def fill_or_compare(
    config: dict[str, Any], path: str, mismatches: list[str], must_match: bool, values: Mapping[str, Any]
) -> None:
    """Replace one "auto", or compare; see ``DeepSpeedPlugin.fill_match``."""
    value = get_value(config, path, MISSING)
    if value is MISSING:
        return
    if value == AUTO:
        if path not in values:
            raise ConfigurationError(
                f"`{path}` not found in kwargs. Please specify `{path}` without `auto` (set to correct value) in the "
                "DeepSpeed config file or pass it in kwargs."
            )
        set_value(config, path, values[path])
    elif must_match and value is not None and path in values and value != values[path]:
        mismatches.append(f"- ds {path}={value} vs arg {path}={values[path]}")


# Replacements for "auto" that neither the script nor the launcher sets. Other "auto" values are filled in by prepare().
_DEFAULTS: dict[str, Any] = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": MISSING,
    "offload_param_nvme_path": MISSING,
    "zero3_save_16bit_model": False,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}


def merge_settings(config: dict[str, Any], source: ConfigSource, settings: Mapping[str, Setting]) -> None:
    """Fill in values that are missing or "auto" with what the script and the launcher set, or else the defaults."""
    check_section_types(config, source.name)
    _refuse_conflicts(config, source, settings)
    for name, path in FILE_PATHS.items():
        value = get_value(config, path, MISSING)
        if value not in (None, AUTO) and value is not MISSING:
            continue
        if name in settings:
            set_value(config, path, settings[name].value)
        elif value is not MISSING and _DEFAULTS[name] is MISSING:
            delete_value(config, path)
        elif value is not MISSING:
            set_value(config, path, _DEFAULTS[name])
    # DeepSpeed's progress lines would be printed by every rank.
    config["steps_per_print"] = math.inf


def _refuse_conflicts(config: Mapping[str, Any], source: ConfigSource, settings: Mapping[str, Setting]) -> None:
    in_both = {
        name: f"{source.name} has {path}: {json.dumps(value)}"
        for name, path in FILE_PATHS.items()
        if name in settings and (value := get_value(config, path)) not in (None, AUTO)
    }
    pairs = {
        name: f"{settings[name].source}, {in_file}"
        for name, in_file in in_both.items()
        if source.by_launcher and settings[name].by_launcher
    }
    if pairs:
        launched = CoreOptions.from_environment().mixed_precision or "no"
        enabled = enabled_precision(config) or launched
        if enabled != launched:
            pairs["mixed_precision"] = f"mixed_precision {launched}, the file enables {enabled}"
        raise both_set(pairs)
    for name, in_file in in_both.items():
        if settings[name].value != get_value(config, FILE_PATHS[name]):
            raise ConfigurationError(
                f"{settings[name].source}, but {in_file}. Set it in one place: leave out the former, or write "
                f'"{AUTO}" in the JSON, which then takes the former\'s value.'
            )


class HfDeepSpeedConfig:
    """A DeepSpeed configuration with queries for the ZeRO stage and offload.

    Args:
        config_file_or_dict: path of a JSON file, a dictionary (which is copied), or the JSON in base64.

    Attributes:
        config: the dictionary.

    Raises:
        ConfigurationError: it has none of these forms, or cannot be read.
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        if config_file_or_dict is None:
            raise ConfigurationError("HfDeepSpeedConfig(None): pass the path of a JSON file or a dictionary.")
        self.config = read_config(config_file_or_dict, None).config
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage and the offload devices again after ``config`` was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param"))
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a dotted key (None if there is none), and the last part of the key."""
        section, _, key = ds_key_long.rpartition(".")
        node = get_value(self.config, section) if section else self.config
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or ``default``."""
        return get_value(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key with everything below it.

        Raises:
            ConfigurationError: ``must_exist`` is set and the key is missing.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ConfigurationError(
                f"the DeepSpeed configuration has no {ds_key_long}. Its keys: {', '.join(self.config)}."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the value of a dotted key is truthy; False if it is missing."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the value of a dotted key is falsy; False if it is missing or null."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return True if the ZeRO stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return True if the ZeRO stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return True if optimizer states or parameters are offloaded to CPU memory or NVMe."""
        return self._offload
