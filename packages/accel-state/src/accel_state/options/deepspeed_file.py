"""A DeepSpeed configuration file beside options of our own: what both set is refused, rather than one of them ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from .config_file import expand
from .deepspeed import FILE_PATHS
from .option import look_up
from .resolution import Resolution

_AUTO = "auto"
_HALF = ("fp16", "bf16")


def check_deepspeed_file(settings: Resolution, must_exist: bool = True) -> None:
    """Refuse options that the DeepSpeed configuration file has a value of its own for.

    Args:
        settings: every option, as resolved.
        must_exist: whether a missing file is an error; it need not be here yet where nothing is started.

    Raises:
        ConfigurationError: the file cannot be read, or it sets what an option sets too; the message names both places
            and values.
    """
    path = settings["deepspeed_config_file"]
    if not settings["use_deepspeed"] or path is None or not (must_exist or os.path.exists(expand(path))):
        return
    content = read_deepspeed_file(path, settings.where("deepspeed_config_file"))
    taken = {name: f"{path} has {key}: {json.dumps(value)}" for name, key, value in _taken(settings, content)}
    precision = _other_precision(settings, content)
    if not taken and not (precision and settings.is_set("mixed_precision")):
        return
    if precision:
        taken["mixed_precision"] = f"{path} enables {precision}"
    raise both_set(
        {
            name: f"{settings.where(name) if settings.is_set(name) else name + ' (not set)'}, {file}"
            for name, file in taken.items()
        }
    )


def both_set(pairs: Mapping[str, str]) -> ConfigurationError:
    """The error for options that the DeepSpeed configuration file sets too.

    Args:
        pairs: by option, both places with their values.
    """
    return ConfigurationError(
        f"When using `deepspeed_config_file`, the following accel config variables will be ignored: {list(pairs)}. "
        "Please specify them "
        "appropriately in the DeepSpeed config file. If you are using an accel config file, remove other config "
        "variables mentioned in "
        "the above specified list. The easiest method is to create a new config following the questionnaire via "
        "`accel config`. It will "
        f"only ask for the necessary config variables when using `deepspeed_config_file`. Both set: "
        f"{'; '.join(pairs.values())}."
    )


def read_deepspeed_file(path: str, where: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration.

    Args:
        path: the file.
        where: what names it, for the message.

    Raises:
        ConfigurationError: it is missing or unreadable, not JSON, or not an object.
    """
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
    """An object of JSON, for ``object_pairs_hook``.

    Raises:
        ConfigurationError: a key stands there twice; JSON would take the last one, and DeepSpeed takes neither.
    """
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigurationError(
                f"the key {key!r} stands there twice, as {json.dumps(seen[key])} and {json.dumps(value)}. Remove one."
            )
        seen[key] = value
    return seen


def _taken(settings: Resolution, content: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Options that somebody set and that the file has a value for: name, path in the file, value there."""
    found = ((name, key, look_up(content, key)) for name, key in FILE_PATHS.items() if settings.is_set(name))
    return [(name, key, value) for name, key, value in found if value not in (None, _AUTO)]


def _other_precision(settings: Resolution, content: Mapping[str, Any]) -> str | None:
    """The precision that the file enables, where it is not ours."""
    enabled = next((name for name in _HALF if look_up(content, f"{name}.enabled") is True), None)
    return enabled if enabled != (settings["mixed_precision"] or "no") else None
