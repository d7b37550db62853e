"""States of models whose stages lie on different ranks: brought together on one, and found again among those of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .fused_dtensor import whole

State = dict[str, Any]


def collect(
    entries: Mapping[Any, Any], mesh: DeviceMesh, device: torch.device, keep: Callable[[torch.Tensor], Any]
) -> dict[Any, Any]:
    """The values of all stages on the first rank, nothing on the others; one tensor is whole at a time. Every rank must
    call it.

    Args:
        entries: of this rank's stages: divided tensors, whole ones, or other values.
        mesh: of all axes.
        device: where ranks communicate.
        keep: what to do with a whole tensor on the first rank.
    """
    group, stage = mesh.get_group("pp"), mesh.get_local_rank("pp")
    # One rank of each stage speaks for it: the one that shares its pp group with the first rank.
    speaks = all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis != "pp")
    if speaks and stage:
        dist.send_object_list([[_announced(key, value) for key, value in entries.items()]], group_dst=0, group=group)
    kept: dict[Any, Any] = {}
    for key, value in entries.items():
        all_of_it = whole(value)
        if speaks and not stage:
            kept[key] = keep(all_of_it.detach()) if isinstance(all_of_it, torch.Tensor) else all_of_it
        elif speaks and isinstance(all_of_it, torch.Tensor):
            dist.send(all_of_it.detach().to(device).contiguous(), group_dst=0, group=group)
    if speaks and not stage:
        for other in range(1, mesh["pp"].size()):
            kept.update(_received(other, group, device, keep))
    return kept


def _announced(key: Hashable, value: Any) -> tuple[Any, Any, Any]:
    return (key, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (key, None, value)


def _received(stage: int, group: Any, device: torch.device, keep: Callable[[torch.Tensor], Any]) -> dict[Any, Any]:
    announced: list[Any] = [None]
    dist.recv_object_list(announced, group_src=stage, group=group)
    found: dict[Any, Any] = {}
    for key, shape, kind in announced[0]:
        if shape is None:
            found[key] = kind
            continue
        tensor = torch.empty(shape, dtype=kind, device=device)
        dist.recv(tensor, group_src=stage, group=group)
        found[key] = keep(tensor)
    return found


def rename_optimizer_state(state: State, names: Mapping[str, str], groups: list[list[str]]) -> State:
    """An optimizer's state as the whole model has it.

    Args:
        state: of this rank, by the names of its parameters.
        names: for each of them its name in the whole model; those that are not in it are another rank's to save.
        groups: names of all parameters in each group, of all stages.
    """
    entries = {names[name]: value for name, value in state["state"].items() if name in names}
    return {
        "state": entries,
        "param_groups": [{**group, "params": own} for group, own in zip(state["param_groups"], groups, strict=True)],
    }


def own_optimizer_state(state: State, names: Mapping[str, str]) -> State:
    """Of an optimizer's state of the whole model, what is about the parameters of this rank.

    Args:
        state: by name.
        names: for each name in the whole model the one that it has here.
    """
    return {
        "state": {names[name]: value for name, value in state["state"].items() if name in names},
        "param_groups": [
            {**group, "params": [names[name] for name in group["params"] if name in names]}
            for group in state["param_groups"]
        ],
    }


def keep_empty_groups(optimizer: Optimizer, change: Callable[[], Any]) -> None:
    """Change an optimizer's state by torch's means, which strip groups without parameters of their settings."""
    empty = {index: dict(group) for index, group in enumerate(optimizer.param_groups) if not group["params"]}
    change()
    for index, settings in empty.items():
        optimizer.param_groups[index].update(settings)
