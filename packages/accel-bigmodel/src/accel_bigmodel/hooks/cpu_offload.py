"""Models that take turns on a device."""

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
        execution_device: where the model runs. None: this machine's accelerator, or the CPU without one.
        prev_module_hook: the hook of a model to move back to the CPU first.
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
        if isinstance(self.prev_module_hook, UserCpuOffloadHook):
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


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
    model: nn.Module, execution_device: Location | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
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
