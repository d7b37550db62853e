"""States of sharded models and of their optimizers: from any number of ranks and any strategy to any other.

The common language is that of ``torch.distributed.checkpoint.state_dict``: weights by their full names, and an
optimizer's state by the full names of the parameters. Each rank handles its own parts of tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from ...checkpoint.names import CheckpointError
from ...core.types import Layout
from ...core.unwrap import clean_name, names_in_order
from .dcp_reader import read_shards
from .fused_dtensor import pack, pack_state, packed_shapes, unpack, whole
from .pipeline_state import keep_empty_groups, own_optimizer_state

State = dict[str, Any]


def part_of(layout: Layout, name: str, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor that has the shape of the named one."""
    like = layout.tensors[name]
    if not isinstance(like, DTensor):
        return full
    # Every rank has read the same tensor, so nothing is sent.
    return distribute_tensor(
        full.to(like.device).reshape(like.shape), like.device_mesh, like.placements, src_data_rank=None
    )


def empty_part(layout: Layout, name: str, dtype: torch.dtype) -> Any:
    """Uninitialised memory for this rank's part of a tensor."""
    return pack(torch.empty_like(layout.tensors[name], dtype=dtype, requires_grad=False), layout.packed.get(name))


def model_state(model: nn.Module) -> State:
    """A model's weights and buffers by name, each rank's part of them. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return pack_state(
        {clean_name(name): value for name, value in get_model_state_dict(model).items()}, packed_shapes(model)
    )


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """An optimizer's state by parameter name, each rank's part of it. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if not optimizer.state:
        # torch would take a step to make one.
        return {"state": {}, "param_groups": _named_groups(model, optimizer)}
    state: State = dict(get_optimizer_state_dict(model, optimizer))
    shapes = packed_shapes(model)
    entries = {
        name: {key: pack(value, shapes.get(clean_name(name))) for key, value in own.items()}
        for name, own in state["state"].items()
    }
    return {**state, "state": entries}


def layout_of(model: nn.Module, ties: Sequence[Sequence[str]]) -> Layout:
    """A sharded model's layout. Every rank must call it.

    Args:
        model: the prepared model.
        ties: of :func:`tied_names`, from before it was sharded.
    """
    held = {name: unpack(value) for name, value in model_state(model).items()}
    tensors = {name: value.detach() for name, value in held.items() if isinstance(value, torch.Tensor)}
    return Layout(model, tensors, ties, packed_shapes(model))


def owner_of(optimizer: Optimizer, models: Iterable[nn.Module], what: str) -> nn.Module:
    """The model whose parameters an optimizer updates.

    Raises:
        ConfigurationError: there is none that has all of them.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if held <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise ConfigurationError(
        f"{what} updates parameters that no single prepared model has, so its state has no names to be saved under. "
        "Prepare the model too, "
        "and use one optimizer for each model."
    )


def whole_optimizer_state(state: State, on_host: Any) -> State:
    """A state with its tensors gathered, one after another, so that no rank has two whole ones in memory at a time.

    Args:
        state: of :func:`optimizer_state`. Every rank must call this.
        on_host: where rank 0 keeps a whole tensor: called with it, returns what takes its place. None on the other
            ranks.
    """
    gathered: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        for key, value in entries.items():
            all_of_it = whole(value)
            if on_host is not None:
                gathered.setdefault(name, {})[key] = (
                    on_host(all_of_it) if isinstance(all_of_it, torch.Tensor) else all_of_it
                )
    return {"state": gathered, "param_groups": state["param_groups"]} if on_host is not None else {}


def read_model(folder: Path, layout: Layout) -> State:
    """A model's state from a folder of sharded files, each rank's part of it.

    Raises:
        CheckpointError: the folder cannot be read, or does not fit the model.
    """
    unknown: list[str] = []

    def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        name = clean_name(".".join(map(str, path)))
        if name not in layout.tensors:
            unknown.append(name)
            return None
        _same_shape(folder, name, size, layout)
        return empty_part(layout, name, dtype)

    state = {clean_name(name): value for name, value in read_shards(folder, like, "model").items()}
    # Their names are enough to say that they are too many.
    return {**state, **dict.fromkeys(unknown)}


def model_from_whole(weights: Mapping[str, Any], layout: Layout, path: Path) -> State:
    """A model's state from whole tensors, each rank's part of it.

    Raises:
        CheckpointError: a tensor has another shape than the model's.
    """
    state: State = {}
    for name, value in weights.items():
        name = clean_name(name)
        if name in layout.tensors and isinstance(value, torch.Tensor):
            _same_shape(path, name, value.shape, layout)
            value = part_of(layout, name, value)
        state[name] = value
    return state


def read_optimizer(folder: Path, layout: Layout) -> State:
    """An optimizer's state from a folder of sharded files, by parameter name, each rank's part of it.

    Raises:
        CheckpointError: the folder cannot be read.
    """

    def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        name = clean_name(str(path[1])) if len(path) > 2 else ""
        found = layout.tensors.get(name)
        same = found is not None and found.ndim and layout.shape(name) == size
        return empty_part(layout, name, dtype) if same else torch.empty(size, dtype=dtype)

    state = read_shards(folder, like, "optimizer")
    return {"state": state.get("state", {}), "param_groups": state["param_groups"]}


def optimizer_from_whole(state: Mapping[str, Any], layout: Layout, names: Sequence[str], path: Path) -> State:
    """An optimizer's state from whole tensors, by parameter name, each rank's part of it.

    Args:
        state: of an optimizer: by number, as torch's own, or by name.
        layout: of the model.
        names: of the parameters in the order of their numbers.
        path: for messages.

    Raises:
        CheckpointError: it is the state of an optimizer of other parameters.
    """
    by_name = named(state, names, path)
    parts = {
        name: {key: _part(layout, name, value) for key, value in entries.items()}
        for name, entries in by_name["state"].items()
    }
    return {"state": parts, "param_groups": by_name["param_groups"]}


def _part(layout: Layout, name: str, value: Any) -> Any:
    like = layout.tensors.get(name)
    same = like is not None and isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == layout.shape(name)
    return part_of(layout, name, value) if same else value


def named(state: Mapping[str, Any], names: Sequence[str], path: Path) -> State:
    """An optimizer's state with parameters called by their names instead of numbers.

    Raises:
        CheckpointError: the numbers are not those of these names.
    """
    groups, entries = state["param_groups"], state["state"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {"state": {clean_name(name): value for name, value in entries.items()}, "param_groups": list(groups)}
    if sorted(numbers) != list(range(len(names))):
        raise CheckpointError(
            f"{path} is the state of an optimizer of {len(numbers)} parameters; here it has {len(names)}."
        )
    return {
        "state": {names[number]: value for number, value in entries.items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


def numbered(state: Mapping[str, Any], names: Sequence[str], path: Path) -> State:
    """An optimizer's state with parameters called by number, for torch's own ``load_state_dict``; the opposite of
    :func:`named`.

    Raises:
        CheckpointError: a name is none of these.
    """
    numbers = {name: number for number, name in enumerate(names)}
    used = [name for group in state["param_groups"] for name in group["params"]]
    unknown = [name for name in [*used, *state["state"]] if name not in numbers]
    if unknown:
        raise CheckpointError(
            f"{path} has the optimizer's state of {unknown[0]}, which the optimizer here does not update."
        )
    # Groups may have been written in another order of names than they are in here.
    return {
        "state": {numbers[name]: value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": sorted(numbers[name] for name in group["params"])} for group in state["param_groups"]
        ],
    }


def _named_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    names = iter(names_in_order(model, optimizer))
    return [{**group, "params": [next(names) for _ in group["params"]]} for group in optimizer.param_groups]


def plan_model(layout: Layout, state: State, strict: bool, path: Path) -> partial[Any]:
    """What puts a model's state in its place. Every rank must call what is returned.

    Raises:
        CheckpointError: weights are missing, or there are more than the model has.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    # Formats that hold every tensor once know one of its names only.
    for names in layout.ties:
        present = [name for name in names if name in state]
        state = {**state, **{name: state[present[0]] for name in names if present and name not in state}}
    missing, unexpected = (
        sorted(set(layout.tensors) - set(state)),
        sorted(set(state) - set(layout.tensors) - layout.elsewhere),
    )
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} does not fit {type(layout.model).__name__}: missing {_some(missing)}; unexpected "
            f"{_some(unexpected)}. Load it into "
            "the model that was saved, or pass strict=False."
        )
    known = {name: unpack(value) for name, value in state.items() if name in layout.tensors}
    return partial(set_model_state_dict, layout.model, known, options=StateDictOptions(strict=False))


def plan_optimizer(layout: Layout, optimizer: Optimizer, state: State, path: Path) -> partial[Any]:
    """What puts an optimizer's state in its place. Every rank must call what is returned.

    Raises:
        CheckpointError: it is the state of an optimizer of other parameters.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if layout.elsewhere:
        state = own_optimizer_state(state, layout.local_names)
    entries = {name: {key: unpack(value) for key, value in own.items()} for name, own in state["state"].items()}
    held: State = {**state, "state": entries}
    _require_parameters(layout.model, optimizer, held, path)
    # Of parameters that have never had a gradient there is no state.
    change = partial(set_optimizer_state_dict, layout.model, optimizer, held, options=StateDictOptions(strict=False))
    return partial(keep_empty_groups, optimizer, change) if layout.elsewhere else change


def _require_parameters(model: nn.Module, optimizer: Optimizer, state: State, path: Path) -> None:
    """Refuse a state that does not know a parameter which the optimizer here updates."""
    known = {
        clean_name(name)
        for name in [*state["state"], *(name for group in state["param_groups"] for name in group.get("params", ()))]
    }
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(clean_name(name))
    updated = [
        item
        for group in optimizer.param_groups
        for item in group["params"]
        if isinstance(item, DTensor) and item.requires_grad
    ]
    missing = [min(names[id(item)]) for item in updated if id(item) in names and not names[id(item)] & known]
    if missing:
        raise CheckpointError(
            f"{path} has the state of an optimizer that does not update {_some(missing)}. Load it into the optimizer "
            "that was saved."
        )


def _same_shape(path: Path, name: str, size: torch.Size, layout: Layout) -> None:
    wanted = layout.shape(name)
    if size != wanted:
        raise CheckpointError(
            f"{path}: {name} has shape {tuple(size)}, and in this model {tuple(wanted)}. Load it into the model that "
            "was saved."
        )


def _some(names: Sequence[str]) -> str:
    return (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
