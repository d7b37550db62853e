"""Models of Transformers that are created sharded: Transformers asks a configuration that somebody keeps alive."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from accel_state.imports import is_transformers_available

from .checks import COUNTS
from .hf_config import HfDeepSpeedConfig
from .nested import AUTO, autos, copied, drop

_MODULE = "transformers.integrations.deepspeed"


def announce(config: Mapping[str, Any]) -> HfDeepSpeedConfig:
    """Have Transformers create and load models within ``deepspeed.zero.Init``, as long as the returned object lives.

    Args:
        config: a configuration of stage 3; what is "auto" in it does not matter yet.
    """
    known = HfDeepSpeedConfig(usable(config))
    if is_transformers_available():
        importlib.import_module(_MODULE).set_hf_deepspeed_config(known)
    return known


def withdraw() -> None:
    """Have Transformers create models as usual again, unless the script itself told it otherwise."""
    module = sys.modules.get(_MODULE)
    reference = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    if module is not None and reference is not None and isinstance(reference(), HfDeepSpeedConfig):
        module.unset_hf_deepspeed_config()


def usable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that ``deepspeed.zero.Init`` takes before a model is prepared: it wants batch sizes, and uses none of them."""
    ready = copied(config)
    train, micro, steps = COUNTS
    if any(ready.get(key) in (None, AUTO) for key in COUNTS):
        ready.pop(train, None)
        for key in (micro, steps):
            ready[key] = 1 if ready.get(key) in (None, AUTO) else ready[key]
    for path in list(autos(ready)):
        drop(ready, path)
    return ready
