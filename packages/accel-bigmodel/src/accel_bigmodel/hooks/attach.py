"""Attaching hooks to all modules of a model that need one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..offload.parent_read_params import borrows, called_modules, lends, lent_tensors
from ..offload.store import PrefixedDataset
from ..tensors import Location, TiedParamsMap, as_device, named_module_tensors, set_module_tensor_to_device
from .align import AlignDevicesHook
from .base import SequentialHook, add_hook_to_module


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Location,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Let the inputs of a module and of all its submodules be sent to a device, where they have no hook yet.

    Modules without any weights are left alone, as they compute wherever their inputs are.

    Args:
        module: the module.
        execution_device: the device.
        skip_keys: as in :class:`AlignDevicesHook`.
        preload_module_classes: classes whose submodules get no hooks: they are loaded as a whole.
        tied_params_map: as in :class:`AlignDevicesHook`.
    """
    has_tensors = next(iter(module.state_dict(keep_vars=True)), None) is not None
    if has_tensors and not hasattr(module, "_hf_hook") and not lends(module):
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if borrows(module, preload_module_classes):
        return
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
    """Give an :class:`AlignDevicesHook` to each module inside a module that holds tensors directly.

    Args:
        module: the module.
        execution_device: where modules are computed.
        offload: their weights are kept in ``weights_map``.
        weights_map: where offloaded weights are found, by full name.
        offload_buffers: buffers are offloaded too.
        module_name: full name of ``module``.
        skip_keys: as in :class:`AlignDevicesHook`.
        preload_module_classes: classes that are loaded as a whole, for modules that use weights of their submodules
            without calling them. torch's attention and encoder layers always are.
        tied_params_map: as in :class:`AlignDevicesHook`.
    """
    as_a_whole = offload and borrows(module, preload_module_classes)
    own = [name for name, _ in named_module_tensors(module)]
    read_here = own if as_a_whole or not offload else list(lent_tensors(module))
    offloaded = {slot.name for hook in align_hooks(module) if hook.offload for slot in hook.slots}
    if offload and (offloaded & set(read_here) or (as_a_whole and offloaded)):
        return  # the model has this module under another name too
    if as_a_whole or read_here:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=PrefixedDataset(weights_map, prefix) if weights_map is not None else None,
            offload_buffers=offload_buffers,
            place_submodules=as_a_whole or len(read_here) > len(own),
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        hook.only = frozenset(read_here) if len(read_here) > len(own) else None
        add_hook_to_module(module, hook, append=True)
    if as_a_whole:
        return
    for name, child in called_modules(module) if offload else module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
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
    """Give the blocks of a model their devices: each one's weights stay there, or visit it for each forward.

    Args:
        module: the model.
        execution_device: the device of each block by full name, or one for all.
        offload: whether each block is offloaded, by full name, or one for all.
        weights_map: where offloaded weights are found, by full name.
        offload_buffers: buffers are offloaded too.
        module_name: full name of ``module``.
        skip_keys: as in :class:`AlignDevicesHook`.
        preload_module_classes: as in :func:`attach_align_device_hook`.
        tied_params_map: as in :class:`AlignDevicesHook`.
    """
    settings = _Settings(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        names = execution_device if isinstance(execution_device, Mapping) else offload
        assert isinstance(names, Mapping)
        for name, block in list(module.named_modules(prefix=module_name)):
            if name in names:
                own_device = execution_device[name] if isinstance(execution_device, Mapping) else execution_device
                own_offload = offload.get(name, False) if isinstance(offload, Mapping) else offload
                settings.attach(block, name, own_device, own_offload)
    elif offload:
        settings.attach(module, module_name, execution_device, True)
    else:
        add_hook_to_module(
            module, settings.hook(execution_device, io_same_device=True, place_submodules=True), append=True
        )
    if module_name == "" and not any(hook.io_same_device for hook in align_hooks(module)):
        add_hook_to_module(module, settings.hook(None, io_same_device=True), append=True)


@dataclass(frozen=True)
class _Settings:
    """What is the same for all blocks."""

    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: str | Sequence[str] | None
    preload_module_classes: Sequence[str] | None
    tied_params_map: TiedParamsMap | None

    def hook(
        self, device: Location | None, io_same_device: bool = False, place_submodules: bool = False
    ) -> AlignDevicesHook:
        """A hook that moves inputs, and weights once."""
        return AlignDevicesHook(
            device,
            io_same_device=io_same_device,
            place_submodules=place_submodules,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
        )

    def attach(self, block: nn.Module, name: str, device: Location | None, offload: bool) -> None:
        """The hooks of one block."""
        if offload:
            attach_align_device_hook(
                block,
                device,
                True,
                self.weights_map,
                self.offload_buffers,
                name,
                self.skip_keys,
                self.preload_module_classes,
                self.tied_params_map,
            )
            if not hasattr(block, "_hf_hook"):
                add_hook_to_module(block, self.hook(device, io_same_device=name == ""))
        else:
            add_hook_to_module(block, self.hook(device, io_same_device=name == "", place_submodules=True), append=True)
        if device is not None:
            attach_execution_device_hook(
                block, device, self.skip_keys, self.preload_module_classes, self.tied_params_map
            )


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """The hooks of a module that move its weights or inputs; several where they were appended to each other."""
    pending, found = [getattr(module, "_hf_hook", None)], []
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, AlignDevicesHook):
            found.append(hook)
        pending = [*(hook.hooks if isinstance(hook, SequentialHook) else ()), *pending]
    return found


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module itself has weights that are there only during its forward."""
    return any(hook.offload for hook in align_hooks(module))


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Location | None = None) -> Iterator[None]:
    """In this context the weights that a module holds directly are on a device, to be looked at or computed with.

    Offloaded ones are there for the time of the context; values written into them are lost with it. Others are moved
    and moved back.

    Args:
        module: the module.
        execution_device: the device. None: offloaded weights come to the one where the module is computed, others stay.
    """
    offloading = [hook for hook in align_hooks(module) if hook.offload]
    if offloading:
        try:
            for hook in offloading:
                hook.onload(None if execution_device is None else as_device(execution_device))
            yield
        finally:
            for hook in offloading:
                hook.abort_forward(module)
    elif execution_device is not None:
        with _moved(module, execution_device):
            yield
    else:
        yield


@contextlib.contextmanager
def _moved(module: nn.Module, device: Location) -> Iterator[None]:
    held = dict(module.named_parameters(recurse=False))
    places = {name: parameter.device for name, parameter in held.items()}
    try:
        for name in held:
            set_module_tensor_to_device(module, name, device)
        yield
    finally:
        for name, place in places.items():
            if module._parameters[name] is not None and module._parameters[name].device.type == "meta":  # type: ignore[union-attr]
                module._parameters[name] = held[name]
            else:
                set_module_tensor_to_device(module, name, place)
