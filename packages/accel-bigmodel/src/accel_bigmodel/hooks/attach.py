"""Attaching hooks to all modules of a model that need one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import parameters_of
from ..offload.prefetch import Prefetcher
from ..offload.store import PrefixedDataset
from ..tensors import Location, TiedParamsMap, as_device, named_module_tensors, set_module_tensor_to_device
from .align import AlignDevicesHook
from .base import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from .experts import RoutedExpertsHook, is_routed_experts


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Location,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Send the inputs of a module and of its submodules to a device, unless they have a hook already.

    Modules without weights get no hook, because they run wherever their inputs are.

    Args:
        preload_module_classes: classes whose submodules get no hooks, because they are loaded as a whole.
    """
    has_tensors = next(iter(module.state_dict(keep_vars=True)), None) is not None
    if has_tensors and not hasattr(module, "_hf_hook"):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Location | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Add an :class:`AlignDevicesHook` to each module inside a module that holds tensors directly.

    Args:
        execution_device: where its modules run.
        offload: offload the weights.
        weights_map: offloaded weights by full name.
        offload_buffers: offload buffers too.
        module_name: full name of ``module``.
        preload_module_classes: classes whose modules get the weights of all their submodules at once.

    Raises:
        ConfigurationError: a module of ``torch.jit`` would be offloaded.
    """
    if offload:
        _refuse_scripted(module, module_name)
    pending = [(module_name, module)]
    while pending:
        path, current = pending.pop()
        prefix = f"{path}." if path else ""
        as_whole = offload and type(current).__name__ in (preload_module_classes or ())
        names = {name for name, _ in named_module_tensors(current)}
        offloaded = {slot.name for hook in align_hooks(current) if hook.offload for slot in hook.slots}
        if offload and (offloaded & names or (as_whole and offloaded)):
            continue  # the model holds this module under another name too
        if as_whole or names:
            is_routed = offload and not as_whole and is_routed_experts(current)
            hook = (RoutedExpertsHook if is_routed else AlignDevicesHook)(
                execution_device=execution_device,
                offload=offload,
                weights_map=PrefixedDataset(weights_map, prefix) if weights_map is not None else None,
                offload_buffers=offload_buffers,
                place_submodules=as_whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(current, hook, append=True)
        if not as_whole:
            pending += reversed([(prefix + name, child) for name, child in current.named_children()])


def _refuse_scripted(module: nn.Module, name: str) -> None:
    """Refuse to offload weights that the interpreter of ``torch.jit`` holds, in which no other tensor can be put."""
    for path, inner in module.named_modules(prefix=name):
        if isinstance(inner, torch.jit.ScriptModule) and next(named_module_tensors(inner), None) is not None:
            raise ConfigurationError(
                f"{path or 'the model'} is a module of torch.jit, and only modules of Python can be offloaded. Keep it "
                f'in memory, dispatch_model(model, {{..., "{path}": "cpu"}}), or offload the module it was made of.'
            )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Location | Mapping[str, Location] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Place the blocks of a model: the weights of each stay on its device, or visit it for each forward.

    Args:
        module: the model.
        execution_device: the device of each block by full name, or one for all.
        offload: whether each block is offloaded, by full name, or one value for all.
        weights_map: offloaded weights by full name.
        offload_buffers: offload buffers too.
        module_name: full name of ``module``.
    """
    hook_options: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    attach_options = {**hook_options, "preload_module_classes": preload_module_classes}

    def attach(block: nn.Module, name: str, device: Location | None, offload: bool) -> None:
        same_device = name == ""
        if offload:
            attach_align_device_hook(block, device, True, weights_map, offload_buffers, name, **attach_options)
        if not offload or not hasattr(block, "_hf_hook"):
            hook = AlignDevicesHook(device, io_same_device=same_device, place_submodules=not offload, **hook_options)
            add_hook_to_module(block, hook, append=True)
        if device is not None:
            attach_execution_device_hook(block, device, **attach_options)

    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        names = execution_device if isinstance(execution_device, Mapping) else offload
        assert isinstance(names, Mapping)
        for name, block in list(module.named_modules(prefix=module_name)):
            if name in names:
                device = execution_device[name] if isinstance(execution_device, Mapping) else execution_device
                is_offloaded = offload.get(name, False) if isinstance(offload, Mapping) else offload
                attach(block, name, device, is_offloaded)
    elif offload:
        attach(module, module_name, execution_device, True)
    else:
        hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **hook_options)
        add_hook_to_module(module, hook, append=True)
    if module_name == "":
        return_outputs_to_inputs(module, **hook_options)


def return_outputs_to_inputs(model: nn.Module, **options: Any) -> None:
    """Move a model's outputs to the device of its inputs; ``options`` are those of a hook that is added for it."""
    hooks = align_hooks(model)
    if not hooks:
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True, **options), append=True)
    elif not any(hook.io_same_device for hook in hooks):
        # No second hook: clients look for an AlignDevicesHook, and do not see one in a sequence.
        hooks[0].io_same_device = True


def attach_prefetcher(model: nn.Module, room: int | None = None) -> None:
    """Let one thread fetch the weights for all hooks of a model that offload weights.

    Args:
        room: bytes for offloaded weights in use and those fetched ahead. None: twice the largest group.
    """
    hooks = [
        hook
        for module in model.modules()
        for hook in align_hooks(module)
        # Which experts a layer needs is known only when its router has run.
        if hook.offload and hook.slots and not isinstance(hook, RoutedExpertsHook)
    ]
    if hooks:
        prefetcher = Prefetcher([hook.weight_group() for hook in hooks], room)
        for index, hook in enumerate(hooks):
            hook.prefetch_with(prefetcher, index)


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of a module that move its weights or inputs; several where they were appended to each other."""
    return [hook for hook in all_hooks(module) if isinstance(hook, AlignDevicesHook)]


def forget_offload(model: nn.Module) -> None:
    """Remove the hooks that offload a model, but not the hooks of others. Its placeholders still answer."""
    for module in model.modules():
        hooks = align_hooks(module)
        if not any(hook.offload or hook.io_same_device for hook in hooks):
            continue
        for hook in hooks:
            # Without this the values come back into memory, which may be too small for all of them.
            hook.offload = hook.offload and not all(slot.is_plain for slot in hook.slots)
        others = [hook for hook in all_hooks(module) if not isinstance(hook, AlignDevicesHook)]
        remove_hook_from_module(module)
        for other in others:
            add_hook_to_module(module, other, append=True)


def all_hooks(module: nn.Module) -> list[ModelHook]:
    """Return the hooks of a module, those of sequences one by one."""
    pending: list[Any] = [getattr(module, "_hf_hook", None)]
    hooks: list[ModelHook] = []
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, SequentialHook):
            pending = [*hook.hooks, *pending]
        elif hook is not None:
            hooks.append(hook)
    return hooks


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if the module itself, without its submodules, has weights only during its forward."""
    return any(hook.offload for hook in align_hooks(module))


def has_offloaded_weights(model: nn.Module) -> bool:
    """Return True if a model or any of its submodules has weights only during its forward."""
    return any(has_offloaded_params(module) for module in model.modules())


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Location | None = None) -> Iterator[None]:
    """Bring the weights that a module holds directly to a device for the duration of the context.

    Offloaded weights are loaded. What is written into those in host memory lasts. Others are moved and moved back.

    Args:
        execution_device: the device. None: load offloaded weights to the module's execution device, move no others.

    Raises:
        OffloadedWriteError: something was written into a weight that is offloaded to files.
    """
    device = None if execution_device is None else as_device(execution_device)
    offloading = [hook for hook in align_hooks(module) if hook.offload]
    parameters = dict(module.named_parameters(recurse=False)) if device is not None and not offloading else {}
    devices = {name: parameter.device for name, parameter in parameters.items()}
    loaded: list[AlignDevicesHook] = []
    succeeded = False
    try:
        for hook in offloading:
            hook.update(module)
            hook.onload(device, read_anew=True)
            loaded.append(hook)
        for name in parameters:
            assert device is not None
            set_module_tensor_to_device(module, name, device)
        yield
        succeeded = True
    finally:
        for hook in loaded:
            hook.offload_again(keep_changes=succeeded, compare=True)
        for name, original in devices.items():
            current = parameters_of(module)[name]
            if current is not None and current.device.type == "meta":
                parameters_of(module)[name] = parameters[name]
            else:
                set_module_tensor_to_device(module, name, original)
