"""Whether DeepSpeed trains in this process, and with which settings of several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from accel_state import AcceleratorState
from accel_state.errors import ConfigurationError, require

from .checks import COUNTS

T = TypeVar("T", bound=Callable[..., Any])


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The DeepSpeedPlugin that the next model is prepared with.

    Args:
        state: an AcceleratorState.

    Raises:
        ConfigurationError: the Accelerator does not train with DeepSpeed.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigurationError(
            f"there is no active DeepSpeedPlugin: this Accelerator's distributed type is {state.distributed_type}. Launch with "
            "--use_deepspeed, or pass Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))."
        )
    return plugin


def deepspeed_required(func: T) -> T:
    """A function that raises ConfigurationError where an Accelerator trains without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state:
            get_active_deepspeed_plugin(AcceleratorState())
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


def GatheredParameters(params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True) -> Any:
    """``deepspeed.zero.GatheredParameters`` for parameters that ZeRO stage 3 has divided; for others a block that does nothing.

    Args:
        params: a parameter, several of them, or a module.
        modifier_rank: the rank whose changes all others get; None where nothing is changed.
        fwd_module: the module whose forward pass uses the parameters.
        enabled: False for a block that does nothing.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    block: AbstractContextManager[Any] = nullcontext()
    given = _listed(params)
    if any(hasattr(parameter, "ds_id") for parameter in given):
        library = require("deepspeed", purpose="ZeRO stage 3", install="accel[deepspeed]")
        block = library.zero.GatheredParameters(given, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled)
    return block


def _listed(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    return [params] if isinstance(params, torch.Tensor) else list(params)


def micro_batch_of_others(plugin: Any) -> int | None:
    """Samples a process and batch of what was prepared with the other plugins of a dictionary; None where nothing was."""
    plugins = AcceleratorState._shared_state.get("deepspeed_plugins")
    others = [one for one in plugins.values() if one is not plugin] if isinstance(plugins, dict) else []
    sizes = [size for one in others if isinstance(size := one.deepspeed_config.get(COUNTS[1]), int)]
    return min(sizes) if sizes else None
