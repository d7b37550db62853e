"""Whole models that take turns on a device."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_state import clear_device_cache, devices
from accel_state.operations import send_to_device

from ..tensors import Location, as_device
from .base import ModelHook, add_hook_to_module, remove_hook_from_module


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it is called, then moves it to its device, where it stays.

    Args:
        execution_device: where the model is computed. None: this machine's accelerator, or the CPU where there is none.
        prev_module_hook: of the model that is moved back to the CPU just before.
    """

    def __init__(
        self, execution_device: Location | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = devices.detect().current() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """What the user holds of a model with a :class:`CpuOffload` hook.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU; it comes to its device again when it is called."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook away; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Location | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it is called; then it stays on its device until it is told, or the next model of a
    chain is called.

    For pipelines of several models, one of which runs many times in a row: faster than :func:`cpu_offload`, and needs
    room for one whole model.

    Args:
        model: the model.
        execution_device: where it is computed. None: this machine's accelerator, or the CPU where there is none.
        prev_module_hook: what this function returned for the model before this one in the pipeline.

    Returns:
        The model, and the hook, whose ``offload()`` moves the model back to the CPU.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
