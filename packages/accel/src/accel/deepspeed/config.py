"""What prepare() knows of a model when its DeepSpeed configuration is completed."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, DeepSpeedOptions
from accel_state.options.config_file import expand
from accel_state.options.deepspeed import FILE_PATHS
from accel_state.options.deepspeed_file import both_set, read_deepspeed_file, without_duplicates
from accel_state.options.option import Option, read_variable

from .config_paths import AUTO, MISSING, copied, drop, get, put
from .validation import check_sections


@dataclass(frozen=True, kw_only=True)
class PreparedFacts:
    """What ``DeepSpeedPlugin.resolve`` fills "auto" in from.

    Attributes:
        world_size: processes that the model is trained on.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        micro_batch_sizes: samples a process and batch of each loader that is prepared together with the model, None for
            a loader that does not know; empty without loaders.
        known_micro_batch_size: samples a process and batch of what was prepared earlier, for a model that comes without
            a loader.
        gradient_accumulation_steps: those of the Accelerator.
        model: the model; only its ``config`` is read, for the hidden size.
        optimizer: what was passed to ``prepare``: a torch optimizer, a DummyOptim, or None for a model that is not
            trained.
        scheduler: the same: a scheduler, a DummyScheduler or None.
        scheduler_steps_per_step: how often a scheduler of the script is stepped for each optimizer step; schedules of a
            dummy, which are written in the same steps, are divided by it.
        more: other values, by dotted path in the DeepSpeed configuration, for whatever else is "auto" there.
    """

    world_size: int
    mixed_precision: str = "no"
    micro_batch_sizes: tuple[int | None, ...] = ()
    known_micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    scheduler_steps_per_step: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)


# The plugin's fields that the launcher hands over under another name.
_OPTION_NAMES = {"transformer_moe_cls_names": "moe_layer_cls_names"}
# How a plugin's own fields show that nobody set them.
_UNSET = {"offload_optimizer_nvme_path": "none", "offload_param_nvme_path": "none"}
_OPTIONS: dict[str, Option] = {opt.field: opt for group in (CoreOptions, DeepSpeedOptions) for opt in group.options()}


@dataclass(frozen=True)
class Given:
    """A setting that somebody gave outside of the JSON.

    Attributes:
        value: the setting.
        source: who gave what, for messages ("DeepSpeedPlugin(zero_stage=3)").
        by_launcher: it was in the environment, not in the script.
    """

    value: Any
    source: str
    by_launcher: bool


@dataclass(frozen=True)
class Origin:
    """Where a JSON comes from.

    Attributes:
        name: for messages ("ds_config.json", "hf_ds_config").
        by_launcher: the launcher named it, not the script.
    """

    name: str
    by_launcher: bool = False


def given(field: str, value: Any) -> Given | None:
    """What the script (``value``) or else the launcher says of one of the plugin's fields; None where both leave it
    open.

    Raises:
        ConfigurationError: the value is not allowed; the message names its source.
    """
    opt = _OPTIONS[_OPTION_NAMES.get(field, field)]
    if value is not None and value not in (AUTO, _UNSET.get(field, AUTO)):
        where = f"DeepSpeedPlugin({field}={value!r})"
        return Given(opt.parse(value, where), where, by_launcher=False)
    launched = read_variable(opt)
    if launched is None:
        return None
    return Given(launched, f"environment variable {opt.env}={opt.format(launched)}", by_launcher=True)


def read(source: Any, launched: str | None) -> tuple[dict[str, Any] | None, Origin]:
    """The JSON of a plugin, if it has one.

    Args:
        source: what the script passed as ``hf_ds_config``.
        launched: the file that the launcher names.

    Raises:
        ConfigurationError: it is of no form that is known, or cannot be read.
    """
    if source is None and launched is None:
        return None, Origin("DeepSpeedPlugin")
    if source is None:
        where = f"environment variable {_OPTIONS['config_file'].env}={launched}"
        return read_deepspeed_file(str(launched), where), Origin(str(launched), by_launcher=True)
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        return parse(path), Origin(path if _is_file(path) else "hf_ds_config (base64)")
    if isinstance(source, Mapping):
        # The script's own dictionary stays as it is.
        return copied(source), Origin("hf_ds_config")
    config = getattr(source, "config", None)
    if isinstance(config, dict):
        # Whoever made this object (the Trainer of Transformers, say) goes on reading from it.
        return config, Origin("hf_ds_config")
    raise ConfigurationError(
        f"hf_ds_config={source!r} is no DeepSpeed configuration. Pass the path of a JSON file, a dictionary, the JSON "
        "in base64, or an "
        "object with a dictionary as its .config, such as HfDeepSpeedConfig."
    )


def parse(text: str) -> dict[str, Any]:
    """A configuration from the path of a file, or from base64.

    Raises:
        ConfigurationError: it is neither, or holds no JSON object.
    """
    if _is_file(text):
        return read_deepspeed_file(text, f"hf_ds_config={text!r}")
    try:
        content = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode("utf-8")
        config = json.loads(content, object_pairs_hook=without_duplicates)
    except ConfigurationError:
        raise
    except (binascii.Error, ValueError, RecursionError):
        raise ConfigurationError(
            f"hf_ds_config={_shown(text)!r} is neither the path of a file that exists nor a JSON object in base64."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"hf_ds_config={_shown(text)!r} is {type(config).__name__} in base64; a DeepSpeed configuration is a JSON "
            "object."
        )
    return config


def _is_file(text: str) -> bool:
    try:
        return expand(text).is_file()
    except OSError:
        return False  # base64 is longer than a file's name may be


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:60] + "..."


# DeepSpeed computes in bf16 beside layers in 8 bits.
_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16", "no": None}


def enabled(config: dict[str, Any]) -> str | None:
    """The precision that the configuration enables, if it does."""
    return next((name for name in ("fp16", "bf16") if get(config, f"{name}.enabled") is True), None)


def settle(config: dict[str, Any], mixed_precision: str, name: str) -> None:
    """Enter a precision, in place, where the configuration leaves it open; "no" leaves it to the configuration.

    Args:
        config: the configuration.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        name: where the configuration comes from, for messages.

    Raises:
        ConfigurationError: the configuration enables another one, or this one is not known.
    """
    if mixed_precision not in _SECTIONS:
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of {', '.join(_SECTIONS)}.")
    wanted, now = _SECTIONS[mixed_precision], enabled(config)
    if wanted is not None and now not in (None, wanted):
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}, but {name} has {now}.enabled: true. Leave mixed_precision out (or "
            f'--mixed_precision), or write "{AUTO}" there.'
        )
    if wanted is not None and get(config, f"{wanted}.enabled") is False:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}, but {name} has {wanted}.enabled: false. Leave one of them out, or "
            f'write "{AUTO}" there.'
        )
    target = wanted if wanted is not None else now
    if target is not None:
        section = config.setdefault(
            target, {"enabled": True, "auto_cast": True} if target == "fp16" else {"enabled": True}
        )
        section["enabled"] = True
    for other in ("fp16", "bf16"):
        if other != target:
            config.setdefault(other, {})["enabled"] = False


class Filling:
    """Remembers what was asked for at the places that were filled in.

    Attributes:
        filled: by dotted path, what stood there before (missing or "auto"), and what was put there (or missing).
    """

    def __init__(self) -> None:
        self.filled: dict[str, tuple[Any, Any]] = {}
        self._asked: Mapping[str, Any] = {}

    def reopened(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy in which whatever was filled in is open again, unless somebody has changed it since."""
        again = copied(config)
        for path, (before, after) in self.filled.items():
            if get(config, path, MISSING) != after:
                continue
            if before is MISSING:
                drop(again, path)
                self._drop_new_sections(again, path)
            else:
                put(again, path, copied(before))
        return again

    def _drop_new_sections(self, config: dict[str, Any], path: str) -> None:
        """Remove the sections around a path that are empty now and were not there."""
        section = path.rpartition(".")[0]
        while section and get(config, section) == {} and get(self._asked, section, MISSING) is MISSING:
            drop(config, section)
            section = section.rpartition(".")[0]

    def show(self, config: dict[str, Any], asked: Mapping[str, Any], complete: Mapping[str, Any]) -> None:
        """Enter the values of a complete configuration into the one that users look at, in place."""
        self._asked = asked
        paths = {path: None for path in (*_leaves(asked), *_leaves(complete))}
        changed = {path: (get(asked, path, MISSING), get(complete, path, MISSING)) for path in paths}
        # What was left out for this model alone (the optimizer, of one that is not trained) stays in sight.
        self.filled = {
            path: (before, after)
            for path, (before, after) in changed.items()
            if before != after and (after is not MISSING or (before == AUTO and path.split(".")[0] in complete))
        }
        for path, (_, after) in self.filled.items():
            if after is MISSING:
                drop(config, path)
            else:
                put(config, path, copied(after))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path


def fill_match(
    config: dict[str, Any], path: str, mismatches: list[str], must_match: bool, values: Mapping[str, Any]
) -> None:
    """Replace one "auto", or compare; see DeepSpeedPlugin.fill_match."""
    now = get(config, path, MISSING)
    if now is MISSING:
        return
    if now == AUTO:
        if path not in values:
            raise ConfigurationError(
                f"`{path}` not found in kwargs. Please specify `{path}` without `auto` (set to correct value) in the "
                "DeepSpeed config file "
                "or pass it in kwargs."
            )
        put(config, path, values[path])
    elif must_match and now is not None and path in values and now != values[path]:
        mismatches.append(f"- ds {path}={now} vs arg {path}={values[path]}")


def process(
    whole: dict[str, Any],
    prefix: str,
    section: Mapping[str, Any],
    mismatches: list[str],
    must_match: bool,
    values: Mapping[str, Any],
) -> None:
    """Do so for every value of a section whose keys begin with ``prefix``."""
    for path in list(_leaves(section, prefix.rstrip("."))):
        fill_match(whole, path, mismatches, must_match, values)


# What stands for "auto" where nobody says anything else. The rest of "auto" is known when a model is prepared.
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


def template() -> dict[str, Any]:
    """What takes the place of a JSON where there is none."""
    config: dict[str, Any] = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
    for path in FILE_PATHS.values():
        put(config, path, AUTO)
    return config


def merge(config: dict[str, Any], origin: Origin, settings: Mapping[str, Given]) -> None:
    """Fill in what a configuration leaves open, in place.

    A value of the JSON that is neither "auto" nor missing stays. What is missing is added where the script or the
    launcher set it; what is "auto" becomes their value, or else the default, or stays "auto" until ``prepare``.

    Args:
        config: the JSON.
        origin: where it comes from.
        settings: what script and launcher set, by the plugin's field.

    Raises:
        ConfigurationError: two places set the same thing; the message names both of them with their values.
    """
    check_sections(config, origin.name)
    _refuse_conflicts(config, origin, settings)
    for field, path in FILE_PATHS.items():
        now = get(config, path, MISSING)
        if now not in (None, AUTO) and now is not MISSING:
            continue
        setting = settings.get(field)
        if setting is not None:
            put(config, path, setting.value)
        elif now is not MISSING and _DEFAULTS[field] is MISSING:
            drop(config, path)
        elif now is not MISSING:
            put(config, path, _DEFAULTS[field])
    # DeepSpeed's own progress lines would come from every rank.
    config["steps_per_print"] = math.inf


def _refuse_conflicts(config: Mapping[str, Any], origin: Origin, settings: Mapping[str, Given]) -> None:
    taken = {
        field: (settings[field], f"{origin.name} has {path}: {json.dumps(value)}")
        for field, path in FILE_PATHS.items()
        if field in settings and (value := get(config, path)) not in (None, AUTO)
    }
    launched = {field: pair for field, pair in taken.items() if origin.by_launcher and pair[0].by_launcher}
    if launched:
        pairs = {field: f"{setting.source}, {file}" for field, (setting, file) in launched.items()}
        precision = _other_precision(config)
        if precision:
            pairs["mixed_precision"] = (
                f"mixed_precision {CoreOptions.from_environment().mixed_precision or 'no'}, {precision}"
            )
        raise both_set(pairs)
    for field, (setting, file) in taken.items():
        if setting.value != get(config, FILE_PATHS[field]):
            raise ConfigurationError(
                f"{setting.source}, but {file}. Say it in one place: leave out the former, or write "
                f'"{AUTO}" in the JSON, which then takes the former\'s value.'
            )


def _other_precision(config: Mapping[str, Any]) -> str | None:
    """What the JSON says of precision, where the launcher says something else."""
    launched = CoreOptions.from_environment().mixed_precision or "no"
    enabled = next((name for name in ("fp16", "bf16") if get(config, f"{name}.enabled") is True), launched)
    return None if enabled == launched else f"the file enables {enabled}"


class HfDeepSpeedConfig:
    """A configuration, and what it says of stage and offload.

    Args:
        config_file_or_dict: the path of a JSON file, a dictionary (which is copied), or the JSON in base64.

    Attributes:
        config: the dictionary.

    Raises:
        ConfigurationError: it is none of these, or cannot be read.
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        config, _ = read(config_file_or_dict, None)
        if config is None:
            raise ConfigurationError(
                "HfDeepSpeedConfig(None) is no configuration. Pass the path of a JSON file or a dictionary."
            )
        self.config = config
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read stage and offload again, after ``config`` was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param"))
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that a dotted key is in, None where there is none, and the last part of the key."""
        section, _, key = ds_key_long.rpartition(".")
        node = get(self.config, section) if section else self.config
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key; ``default`` where there is none."""
        return get(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with everything under it.

        Raises:
            ConfigurationError: there is none, and ``must_exist``.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ConfigurationError(
                f"the DeepSpeed configuration has no {ds_key_long}. Its keys: {', '.join(self.config)}."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is there, with a value that counts as true."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is there, with a value that counts as false."""
        value = self.get_value(ds_key_long, MISSING)
        return value is not MISSING and value is not None and not value

    def is_zero2(self) -> bool:
        """Whether ZeRO stage 2 is set."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether ZeRO stage 3 is set."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded to CPU memory or a drive."""
        return self._offload
