"""State dicts of models with offloaded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..offload.store import OffloadedWeightsLoader
from ..placeholder import has_values
from ..tensors import Location
from .attach import align_hooks, align_module_device, has_offloaded_params
from .base import LOAD_HOOK
from .slots import Slot


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a dispatched model, offloaded weights included, on the CPU.

    Weights in safetensors files are mapped, so the model need not fit into memory. Tied weights are one tensor.

    Args:
        model: the model, with or without hooks.

    Raises:
        ConfigurationError: tensors without values that no hook knows.
    """
    offloaded = _offloaded_values(model)
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in offloaded:
            value = offloaded[id(value)]
        elif isinstance(value, torch.Tensor) and has_values(value):
            value = value.detach().cpu()
        state[name] = value
    empty = [name for name, value in state.items() if isinstance(value, torch.Tensor) and not has_values(value)]
    if empty:
        raise ConfigurationError(
            f"{len(empty)} tensors have no values: {', '.join(empty[:8])}. Load the model's weights first."
        )
    return state


def accept_state_dicts(model: nn.Module) -> None:
    """Let ``load_state_dict`` of a model load into its offloaded weights, or refuse it before anything is loaded."""
    for module in model.modules():
        if LOAD_HOOK not in module.__dict__ and (module is model or has_offloaded_params(module)):
            module.__dict__[LOAD_HOOK] = module.register_load_state_dict_pre_hook(_load)


def _load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any) -> None:
    """Write the values of a state dict into the offloaded weights of a module.

    Raises:
        OffloadedWriteError: an offloaded weight of the module or within it is in a file.
    """
    if metadata.get("assign_to_params_buffers"):
        return
    for path, inner in module.named_modules(prefix=prefix.removesuffix(".")):
        for slot in _loaded_slots(inner, state, path):
            slot.check_writable()
    for slot in _loaded_slots(module, state, prefix.removesuffix(".")):
        name = f"{prefix}{slot.name}"
        if state[name].shape == slot.placeholder.shape:  # torch refuses others
            slot.placeholder.detach().copy_(state[name])
            state[name] = slot.placeholder.detach()


def _loaded_slots(module: nn.Module, state: dict[str, Any], path: str) -> list[Slot]:
    prefix = f"{path}." if path else ""
    slots = [slot for hook in align_hooks(module) for slot in hook.slots]
    return [slot for slot in slots if slot.is_empty and slot.is_plain and f"{prefix}{slot.name}" in state]


def _offloaded_values(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the values of all offloaded weights, by the id of their placeholder."""
    requests: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    for module in model.modules():
        for hook in align_hooks(module):
            hook.update(module)
            source, names = hook.source()
            _, placeholders = requests.setdefault(id(source), (source, []))
            placeholders += [(id(slot.placeholder), name) for slot, name in zip(hook.slots, names, strict=True)]
    values: dict[int, torch.Tensor] = {}
    for source, placeholders in requests.values():
        weights = source
        if isinstance(source, OffloadedWeightsLoader):
            weights = source.read_many({name for _, name in placeholders})
        for placeholder, name in placeholders:
            values.setdefault(placeholder, weights[name].cpu())
    return values


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Location = "cpu"
) -> dict[str, Any]:
    """Put the weights of one module with offloaded weights into a state dict.

    Args:
        module_name: full name of one of its tensors.
        state_dict: receives the values of those of its names that belong to the module.
        device_to_put_offload: the device of the values.

    Returns:
        The state dict.
    """
    path = module_name.rpartition(".")[0]
    prefix = f"{path}." if path else ""
    with align_module_device(module, device_to_put_offload):
        for name, value in module.state_dict().items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = value
    return state_dict
