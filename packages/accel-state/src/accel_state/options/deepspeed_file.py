"""Rejects options that a DeepSpeed configuration file sets too, since one of the two would be ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from .config_file import expand
from .declaration import look_up
from .deepspeed import FILE_PATHS
from .resolution import Resolution


def check_deepspeed_file(settings: Resolution, must_exist: bool = True) -> None:
    """Reject options that the DeepSpeed configuration file gives a value too.

    Args:
        settings: every option, as resolved.
        must_exist: whether a missing file is an error, which it is not if nothing is started on this machine.

    Raises:
        ConfigurationError: the file cannot be read, or it sets an option too; the message names both places and values.
    """
    path = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or path is None or not (must_exist or os.path.exists(expand(path))):
        return
    content = read_deepspeed_file(path, settings.where("deepspeed_config_file"))
    conflicts: dict[str, str] = {}
    for name, key in FILE_PATHS.items():
        value = look_up(content, key)
        if settings.is_set(name) and value not in (None, "auto"):
            conflicts[name] = f"{path} has {key}: {json.dumps(value)}"
    precision = next((name for name in ("fp16", "bf16") if look_up(content, f"{name}.enabled") is True), None)
    differs = precision is not None and precision != (settings["mixed_precision"] or "no")
    if not conflicts and not (differs and settings.is_set("mixed_precision")):
        return
    if differs:
        conflicts["mixed_precision"] = f"{path} enables {precision}"
    places = {name: settings.where(name) if settings.is_set(name) else f"{name} (not set)" for name in conflicts}
    raise both_set({name: f"{places[name]}, {in_file}" for name, in_file in conflicts.items()})


def both_set(pairs: Mapping[str, str]) -> ConfigurationError:
    """The error for options that the DeepSpeed configuration file sets too, with both places of each."""
    return ConfigurationError(
        f"When using `deepspeed_config_file`, the following accel config variables will be ignored: {list(pairs)}. "
        "Please specify them appropriately in the DeepSpeed config file. If you are using an accel config file, remove "
        "other config variables mentioned in the above specified list. The easiest method is to create a new config "
        "following the questionnaire via `accel config`. It will only ask for the necessary config variables when "
        f"using `deepspeed_config_file`. Both set: {'; '.join(pairs.values())}."
    )


def read_deepspeed_file(path: str, where: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration; ``where`` is the setting that names it, for the message."""
    try:
        content = json.loads(expand(path).read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    except OSError as error:
        raise ConfigurationError(
            f"{where}: {error.strerror}. Give the path of a DeepSpeed configuration in JSON."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where}: a DeepSpeed configuration is a JSON object, not {type(content).__name__}.")
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: reject duplicate keys, which json accepts and DeepSpeed rejects."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigurationError(
                f"the key {key!r} is given twice, as {json.dumps(seen[key])} and {json.dumps(value)}. Remove one."
            )
        seen[key] = value
    return seen
