"""What a DeepSpeed configuration is made of, each part with the place it comes from."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, DeepSpeedOptions
from accel_state.options.config_file import expand
from accel_state.options.declare import Option, read_variable
from accel_state.options.deepspeed_file import read_deepspeed_file, without_duplicates

from .nested import AUTO, copied

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
    """What the script (``value``) or else the launcher says of one of the plugin's fields; None where both leave it open.

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
        f"hf_ds_config={source!r} is no DeepSpeed configuration. Pass the path of a JSON file, a dictionary, the JSON in base64, or an "
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
            f"hf_ds_config={_shown(text)!r} is {type(config).__name__} in base64; a DeepSpeed configuration is a JSON object."
        )
    return config


def _is_file(text: str) -> bool:
    try:
        return expand(text).is_file()
    except OSError:
        return False  # base64 is longer than a file's name may be


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:60] + "..."
