"""States of sharded models and their optimizers, converted between any number of ranks and any strategy.

The common format is that of ``torch.distributed.checkpoint.state_dict``: weights by name, and an optimizer's state by
the names of the parameters. Each rank only handles its own parts of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded.reader import Source, read_shards
from accel_checkpoint.validation import Change, check_named_optimizer, check_named_structure, remember
from accel_state.errors import ConfigurationError

from ..._torch_compat import shard_replicated
from ...core.fused_dtensor import full_tensor, pack, pack_state, packed_shapes, unpack
from ...core.quantized_layers import add_scales
from ...core.types import Layout
from ...core.unwrap import clean_name, names_in_order
from .pipeline_state import keep_empty_groups, local_optimizer_state

State = dict[str, Any]


def part_of(layout: Layout, name: str, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor that has the shape of the named one."""
    like = layout.tensors[name]
    if not isinstance(like, DTensor):
        return full
    # Every rank has read the same tensor, so nothing is sent.
    return shard_replicated(full.to(like.device).reshape(like.shape), like.device_mesh, like.placements)


def empty_part(layout: Layout, name: str, dtype: torch.dtype) -> Any:
    """Uninitialised memory for this rank's part of a tensor."""
    return pack(torch.empty_like(layout.tensors[name], dtype=dtype, requires_grad=False), layout.packed.get(name))


def model_state(model: nn.Module) -> State:
    """Return this rank's parts of a model's weights and buffers by name. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = {clean_name(name): value for name, value in get_model_state_dict(model).items()}
    add_scales(model, state)
    return pack_state(state, packed_shapes(model))


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return this rank's parts of an optimizer's state by parameter name. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if not _has_state(model, optimizer):
        # torch would take a step to create one.
        names = iter(names_in_order(model, optimizer))
        groups = [{**group, "params": [next(names) for _ in group["params"]]} for group in optimizer.param_groups]
        return {"state": {}, "param_groups": groups}
    state: State = dict(get_optimizer_state_dict(model, optimizer))
    shapes = packed_shapes(model)
    packed = {}
    for name, entries in state["state"].items():
        shape = shapes.get(clean_name(name))
        packed[name] = {key: pack(value, shape) for key, value in entries.items()}
    return {**state, "state": packed}


def _has_state(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return True if the optimizer has state on any rank. Every rank must call it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    unit = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if unit is None:
        return bool(optimizer.state)
    # Of a few trainable parameters in flat ones (adapters), a rank may hold no element, and so no state.
    found = torch.tensor([bool(optimizer.state)], dtype=torch.int32, device=unit.compute_device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=unit.process_group)
    return bool(found.item())


def layout_of(model: nn.Module, ties: Sequence[Sequence[str]]) -> Layout:
    """Return a sharded model's layout. Every rank must call it."""
    state = {name: unpack(value) for name, value in model_state(model).items()}
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return Layout(model, tensors, ties, packed_shapes(model))


def owner_of(optimizer: Optimizer, models: Iterable[nn.Module], what: str) -> nn.Module:
    """Return the model whose parameters an optimizer updates."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if updated <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise ConfigurationError(
        f"{what} updates parameters that no single prepared model has, so its state cannot be saved by name. Prepare "
        "the model too, and use one optimizer for each model."
    )


def full_optimizer_state(state: State, on_host: Any) -> State:
    """Gather an optimizer's state on rank 0 with one full tensor in memory at a time. Every rank must call it."""
    gathered: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        for key, value in entries.items():
            full = full_tensor(value)
            if on_host is not None:
                gathered.setdefault(name, {})[key] = on_host(full) if isinstance(full, torch.Tensor) else full
    return {"state": gathered, "param_groups": state["param_groups"]} if on_host is not None else {}


def read_model(directory: Path, layout: Layout, source: Source | None = None) -> State:
    """Return this rank's parts of a model's state, from a directory of sharded files."""
    unknown: list[str] = []

    def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        name = clean_name(".".join(map(str, path)))
        if name not in layout.tensors:
            unknown.append(name)
            return None
        _check_shape(directory, name, size, layout)
        return empty_part(layout, name, dtype)

    state = {clean_name(name): value for name, value in read_shards(directory, like, "model", source).items()}
    # Names suffice to report unexpected tensors.
    return {**state, **dict.fromkeys(unknown)}


def model_from_full(weights: Mapping[str, Any], layout: Layout, path: Path) -> State:
    """Return this rank's parts of a model's state, from full tensors."""
    state: State = {}
    for name, value in weights.items():
        name = clean_name(name)
        if name in layout.tensors and isinstance(value, torch.Tensor):
            _check_shape(path, name, value.shape, layout)
            value = part_of(layout, name, value)
        state[name] = value
    return state


def read_optimizer(directory: Path, layout: Layout, source: Source | None = None) -> State:
    """Return this rank's parts of an optimizer's state by parameter name, from a directory of sharded files."""

    def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        name = clean_name(str(path[1])) if len(path) > 2 else ""
        tensor = layout.tensors.get(name)
        is_sharded_alike = tensor is not None and tensor.ndim and layout.shape(name) == size
        return empty_part(layout, name, dtype) if is_sharded_alike else torch.empty(size, dtype=dtype)

    state = read_shards(directory, like, "optimizer", source)
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return {"state": state.get("state", {}), "param_groups": groups} if groups is not None else {}


def optimizer_from_full(state: Mapping[str, Any], layout: Layout, names: Sequence[str], path: Path) -> State:
    """Return this rank's parts of an optimizer's state by parameter name, from full tensors."""
    by_name = named(state, names, path)
    parts: dict[str, dict[str, Any]] = {}
    for name, entries in by_name["state"].items():
        like = layout.tensors.get(name)
        parts[name] = {}
        for key, value in entries.items():
            is_moment = isinstance(value, torch.Tensor) and value.ndim > 0 and like is not None
            is_moment = is_moment and value.shape == layout.shape(name)
            parts[name][key] = part_of(layout, name, value) if is_moment else value
    return {"state": parts, "param_groups": by_name["param_groups"]}


def named(state: Mapping[str, Any], names: Sequence[str], path: Path) -> State:
    """Return an optimizer's state by parameter names instead of numbers."""
    check_named_structure(state, path)
    groups, entries = state["param_groups"], state["state"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {"state": {clean_name(name): value for name, value in entries.items()}, "param_groups": list(groups)}
    if sorted(numbers) != list(range(len(names))):
        raise CheckpointError(
            f"{path} is the state of an optimizer of {len(numbers)} parameters, but this one has {len(names)}."
        )
    return {
        "state": {names[number]: value for number, value in entries.items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


def numbered(state: Mapping[str, Any], names: Sequence[str], path: Path) -> State:
    """Return the inverse of :func:`named`, for torch's own ``load_state_dict``."""
    numbers = {name: number for number, name in enumerate(names)}
    used = [name for group in state["param_groups"] for name in group["params"]]
    unknown = [name for name in [*used, *state["state"]] if name not in numbers]
    if unknown:
        raise CheckpointError(f"{path} has optimizer state of {unknown[0]}, which this optimizer does not update.")
    # The order of names within a group may differ from the one in the file.
    groups = [{**group, "params": sorted(numbers[name] for name in group["params"])} for group in state["param_groups"]]
    return {"state": {numbers[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def plan_model(layout: Layout, state: State, strict: bool, path: Path) -> partial[Any]:
    """Return the call that loads a model's state, which every rank must make."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    # Formats that hold every tensor once have only one of its names.
    for names in layout.ties:
        present = [name for name in names if name in state]
        state = {**state, **{name: state[present[0]] for name in names if present and name not in state}}
    missing = sorted(set(layout.tensors) - set(state))
    unexpected = sorted(set(state) - set(layout.tensors) - layout.elsewhere)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} does not fit {type(layout.model).__name__}: missing {_summary(missing)}; unexpected "
            f"{_summary(unexpected)}. Load it into the model that was saved, or pass strict=False."
        )
    for name in layout.tensors.keys() & state.keys():
        value = state[name]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor. Choose another one.")
        if value.shape != layout.tensors[name].shape:  # full tensors are held in another shape where they are packed
            _check_shape(path, name, value.shape, layout)
    known = {name: unpack(value) for name, value in state.items() if name in layout.tensors}
    return partial(set_model_state_dict, layout.model, known, options=StateDictOptions(strict=False))


def plan_optimizer(layout: Layout, optimizer: Optimizer, state: State, path: Path) -> Change:
    """Return the load of an optimizer's state, which every rank must make."""

    def shapes_of(name: str) -> tuple[torch.Size, ...]:
        return (layout.shape(name), layout.tensors[name].shape) if name in layout.tensors else ()

    check_named_optimizer(optimizer, state, shapes_of, path)
    if layout.elsewhere:
        state = local_optimizer_state(state, layout.local_names)
    unpacked = {}
    for name, entries in state["state"].items():
        unpacked[name] = {key: unpack(value) for key, value in entries.items()}
    state = {**state, "state": unpacked}
    _check_parameters(layout.model, optimizer, state, path)
    load = partial(_load_optimizer, layout.model, optimizer, state)
    if layout.elsewhere:
        load = partial(keep_empty_groups, optimizer, load)
    return Change(path, load, partial(remember, optimizer))


def _load_optimizer(model: nn.Module, optimizer: Optimizer, state: State) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    # torch leaves out the states of parameters that are frozen now, but they may be trained later.
    saved = set(map(clean_name, state["state"]))
    frozen = [one for one, names in _names_in(model, optimizer) if names & saved and not one.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        # Parameters that never had a gradient have no state, so loading is not strict.
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _names_in(model: nn.Module, optimizer: Optimizer) -> list[tuple[nn.Parameter, set[str]]]:
    """Return the parameters of an optimizer with their names in a model."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(clean_name(name))
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, names.get(id(parameter), set())) for parameter in updated]


def _check_parameters(model: nn.Module, optimizer: Optimizer, state: State, path: Path) -> None:
    """Refuse a state without an entry for a parameter that the optimizer updates."""
    in_groups = [name for group in state["param_groups"] for name in group.get("params", ())]
    known = {clean_name(name) for name in [*state["state"], *in_groups]}
    missing = [
        min(names)
        for parameter, names in _names_in(model, optimizer)
        if isinstance(parameter, DTensor) and parameter.requires_grad and names and not names & known
    ]
    if missing:
        raise CheckpointError(
            f"{path} has the state of an optimizer that does not update {_summary(missing)}. Load it into the "
            "optimizer that was saved."
        )


def _check_shape(path: Path, name: str, size: torch.Size, layout: Layout) -> None:
    expected = layout.shape(name)
    if size != expected:
        raise CheckpointError(
            f"{path}: {name} has shape {tuple(size)}, but {tuple(expected)} in this model. Load it into the model that "
            "was saved."
        )


def _summary(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing"
