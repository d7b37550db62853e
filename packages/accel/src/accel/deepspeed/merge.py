"""One configuration out of a JSON, the script's settings and the launcher's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions
from accel_state.options.deepspeed import FILE_PATHS
from accel_state.options.deepspeed_file import both_set

from .checks import check_sections
from .nested import AUTO, MISSING, drop, get, put
from .sources import Given, Origin

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

    A value of the JSON that is neither "auto" nor missing stays. What is missing is added where the script or the launcher set it; what is
    "auto" becomes their value, or else the default, or stays "auto" until ``prepare``.

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
            pairs["mixed_precision"] = f"mixed_precision {CoreOptions.from_environment().mixed_precision or 'no'}, {precision}"
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
