"""Storing weights in a small dtype and computing in a larger one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..tensors import as_dtype
from .base import ModelHook, add_hook_to_module

# Layers whose weights are large and tolerate rounding; others are small or lose too much accuracy.
_CAST_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Stores a layer's weights in one dtype and computes with them in another.

    Args:
        storage_dtype: dtype of the weights between forwards.
        compute_dtype: dtype of the weights during a forward.
        non_blocking: let the conversions overlap with other work.
    """

    def __init__(self, storage_dtype: str | torch.dtype, compute_dtype: str | torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = as_dtype(storage_dtype)
        self.compute_dtype = as_dtype(compute_dtype)
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.abort_forward(module)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: str | torch.dtype,
    compute_dtype: str | torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Sequence[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of all linear and convolution layers of a model in a small dtype, such as an 8-bit float.

    Args:
        module: the model.
        storage_dtype: dtype of the weights between forwards.
        compute_dtype: dtype of the weights during a forward.
        skip_modules_pattern: regular expressions, searched in full names; matching modules are left unchanged.
        skip_modules_classes: classes whose modules are left unchanged.
        non_blocking: let the conversions overlap with other work.

    Raises:
        ConfigurationError: a dtype that is not floating point.
    """
    storage_dtype, compute_dtype = as_dtype(storage_dtype), as_dtype(compute_dtype)
    for dtype in (storage_dtype, compute_dtype):
        if not dtype.is_floating_point:
            raise ConfigurationError(f"{dtype} cannot hold weights: both dtypes must be floating point")
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    skipped = tuple(skip_modules_classes or ())
    pending = [("", module)]
    while pending:
        name, child = pending.pop()
        if isinstance(child, skipped) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(child, _CAST_LAYERS):
            add_hook_to_module(child, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            pending += [(f"{name}.{key}" if name else key, grandchild) for key, grandchild in child.named_children()]
