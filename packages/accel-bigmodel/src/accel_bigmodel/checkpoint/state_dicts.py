"""State dicts of models whose weights are elsewhere, and cutting state dicts into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_state import convert_file_size_to_int
from accel_state.errors import ConfigurationError

from ..hooks.attach import align_hooks, align_module_device
from ..offload.store import OffloadedWeightsLoader
from ..tensors import Location

WEIGHTS_NAME = "pytorch_model.bin"


def has_offloaded_weights(model: nn.Module) -> bool:
    """Whether a model or any module inside has weights that are there only during its forward."""
    return any(hook.offload for module in model.modules() for hook in align_hooks(module))


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a dispatched model, offloaded weights included, on the CPU.

    What lies in safetensors files is mapped from there, so that the whole need not fit into memory. Shared weights are
    one tensor.

    Args:
        model: the model, with hooks or without.

    Raises:
        ConfigurationError: tensors without values that no hook knows.
    """
    offloaded = _offloaded_values(model)
    found: dict[str, Any] = {}
    for name, held in model.state_dict(keep_vars=True).items():
        if id(held) in offloaded:
            found[name] = offloaded[id(held)]
        else:
            has_values = isinstance(held, torch.Tensor) and held.device.type != "meta"
            found[name] = held.detach().cpu() if has_values else held
    empty = [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.device.type == "meta"]
    if empty:
        raise ConfigurationError(
            f"{len(empty)} tensors have no values: {', '.join(empty[:8])}. Load the model's weights first."
        )
    return found


def _offloaded_values(model: nn.Module) -> dict[int, torch.Tensor]:
    """Values of all offloaded weights, by the identity of what is in their place."""
    wanted: dict[int, tuple[Any, list[tuple[int, str]]]] = {}
    for module in model.modules():
        for hook in align_hooks(module):
            source, names = hook.source()
            _, asked = wanted.setdefault(id(source), (source, []))
            asked += [(id(slot.resting), name) for slot, name in zip(hook.slots, names, strict=True)]
    values: dict[int, torch.Tensor] = {}
    for source, asked in wanted.values():
        names = [name for _, name in asked]
        read = (
            source.read_many(names)
            if isinstance(source, OffloadedWeightsLoader)
            else {name: source[name] for name in names}
        )
        for place, name in asked:
            values.setdefault(place, read[name].cpu())
    return values


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Location = "cpu"
) -> dict[str, Any]:
    """Put the weights of one module with offloaded weights into a state dict.

    Args:
        module: the module.
        module_name: full name of one of its tensors.
        state_dict: gets the values of those of its names that belong to the module.
        device_to_put_offload: where the values are put.

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


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """The size of a module together with those that hold its shared weights too.

    Args:
        tied_params: full names under which other modules hold its weights.
        module_size: bytes of the module.
        module_sizes: bytes by full name.
        modules_to_treat: full names and modules to look in.

    Returns:
        Bytes with the shared weights counted once; names and modules of the others.
    """
    if not tied_params:
        return module_size, [], []
    size, names, modules = module_size, [], []
    for weight in tied_params:
        holder = next(((n, m) for n, m in modules_to_treat if weight == n or weight.startswith(f"{n}.")), None)
        if holder is None:
            raise ConfigurationError(f"none of the modules to treat holds {weight}")
        size -= module_sizes[weight]
        if holder[0] not in names:
            names.append(holder[0])
            modules.append(holder[1])
            size += module_sizes[holder[0]]
    return size, names, modules


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules of a model, those inside a module before it; the model comes last.

    Args:
        model: the model.
        return_fqns: pairs of full name and module instead.
    """
    pending, found = [("", model)], []
    while pending:
        name, module = pending.pop()
        found.append((name, module) if return_fqns else module)
        pending += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return found[::-1]


def shard_checkpoint(
    state_dict: Mapping[str, torch.Tensor], max_shard_size: int | str = "10GB", weights_name: str = WEIGHTS_NAME
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any] | None]:
    """Cut a state dict into files, in the order of its names: a file is full when the next tensor would make it too
    large.

    Weights of [6, 6, 2, 6, 2, 2] GB and a limit of 10 GB become [6], [6, 2] and [6, 2, 2]. A tensor above the limit
    gets a file of its own. Tensors that share memory stay together and count once.

    Args:
        state_dict: names and tensors.
        max_shard_size: bytes, or text such as "5GB".
        weights_name: the file's name if there is one; several are ``pytorch_model-00001-of-00003.bin`` and so on.

    Returns:
        File names with their parts of the state dict; and the index, None for one file.
    """
    limit = convert_file_size_to_int(max_shard_size)
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    shard_of: dict[tuple[torch.device, int], int] = {}
    for name, tensor in state_dict.items():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        known = shard_of.get(storage) if tensor.device.type != "meta" and tensor.numel() else None
        if known is not None:
            shards[known][name] = tensor
            continue
        size = tensor.numel() * tensor.element_size()
        if sizes[-1] and sizes[-1] + size > limit:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += size
        shard_of[storage] = len(shards) - 1
    if len(shards) == 1:
        return {weights_name: shards[0]}, None
    stem, _, suffix = weights_name.rpartition(".")
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    return dict(zip(names, shards, strict=True)), {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
