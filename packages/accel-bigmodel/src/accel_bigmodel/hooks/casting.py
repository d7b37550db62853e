"""Turns of models on a device, and storing weights in a smaller dtype than the one to compute in."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accel_state import clear_device_cache, devices
from accel_state.errors import ConfigurationError
from accel_state.operations import send_to_device

from ..placeholder import Placeholder
from ..tensors import Location, as_device, as_dtype
from .base import ModelHook, add_hook_to_module, remove_hook_from_module

Model = TypeVar("Model", bound=nn.Module)

# Layers whose weights are large and tolerate rounding; others are small or lose too much accuracy.
_CAST_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


# Threads that run a model share the weights that are converted for a forward.
_CONVERTING = threading.Lock()


class LayerwiseCastingHook(ModelHook):
    """Stores a layer's weights in one dtype and computes with them in another.

    Args:
        storage_dtype: dtype of the weights between forwards.
        compute_dtype: dtype of the weights during a forward.
        non_blocking: let the conversions overlap with other work.
    """

    def __init__(self, storage_dtype: str | torch.dtype, compute_dtype: str | torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype: torch.dtype = as_dtype(storage_dtype)
        self.compute_dtype: torch.dtype = as_dtype(compute_dtype)
        self.non_blocking = non_blocking
        self._users = 0

    needs_values = True

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with _CONVERTING:
            self._users += 1
            module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.abort_forward(module)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        with _CONVERTING:
            self._users = max(0, self._users - 1)
            if not self._users:
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
        ConfigurationError: a dtype that is not floating point; layers whose weights are offloaded.
    """
    storage_dtype, compute_dtype = as_dtype(storage_dtype), as_dtype(compute_dtype)
    for dtype in (storage_dtype, compute_dtype):
        if not dtype.is_floating_point:
            raise ConfigurationError(f"{dtype} cannot hold weights: both dtypes must be floating point")
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    skipped = tuple(skip_modules_classes or ())
    pending, layers = [("", module)], []
    while pending:
        name, child = pending.pop()
        if isinstance(child, skipped) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(child, _CAST_LAYERS):
            layers.append(child)
            offloaded = [
                key for key, tensor in child.named_parameters(recurse=False) if isinstance(tensor, Placeholder)
            ]
            if offloaded:
                raise ConfigurationError(
                    f"{name}.{offloaded[0]} is offloaded, so its dtype cannot be changed any more: call "
                    "attach_layerwise_casting_hooks before the model is offloaded or dispatched."
                )
        else:
            pending += [(f"{name}.{key}" if name else key, grandchild) for key, grandchild in child.named_children()]
    for layer in layers:
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it is called, then moves it to its device, where it stays.

    Args:
        execution_device: where the model runs. None: this machine's accelerator, or the CPU without one.
        prev_module_hook: the hook of a model to move back to the CPU first.
    """

    def __init__(
        self, execution_device: Location | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Location = devices.detect().current() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return _moved(module, torch.device("cpu"))

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = as_device(self.execution_device)
        if isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
            clear_device_cache()
        _moved(module, device)
        return send_to_device(args, device), send_to_device(kwargs, device)


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """``module.to(device)``, which visits each tensor even where nothing is to be moved."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return module if all(tensor.device == device for tensor in tensors) else module.to(device)


class UserCpuOffloadHook:
    """A handle to offload a model that has a :class:`CpuOffload` hook, or to remove the hook."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU until its next call."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Model, execution_device: Location | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Model, UserCpuOffloadHook]:
    """Keep a model on the CPU until it is called, then on its device until offloaded or until the next model runs.

    For pipelines of several models that run many times in a row: faster than :func:`cpu_offload`, but the device must
    hold one whole model.

    Args:
        execution_device: where the model runs. None: this machine's accelerator, or the CPU without one.
        prev_module_hook: the handle of the previous model in the pipeline, which is offloaded when this model runs.

    Returns:
        The model, and the handle whose ``offload()`` moves the model back to the CPU.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
