"""States of models whose pipeline stages are on different ranks: gathered on one rank, and split again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ...core.fused_dtensor import full_tensor

State = dict[str, Any]


def collect(
    entries: Mapping[Any, Any], mesh: DeviceMesh, device: torch.device, keep: Callable[[torch.Tensor], Any]
) -> dict[Any, Any]:
    """Gather the values of all stages on the first rank, one full tensor at a time; empty elsewhere. Collective."""
    group, stage = mesh.get_group("pp"), mesh.get_local_rank("pp")
    # One rank of each stage sends: the one that shares its pp group with the first rank.
    is_sender = all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis != "pp")
    if is_sender and stage:
        # (key, shape, dtype) of tensors, (key, None, value) of other values.
        announced = [
            (key, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (key, None, value)
            for key, value in entries.items()
        ]
        dist.send_object_list([announced], group_dst=0, group=group)
    kept: dict[Any, Any] = {}
    for key, value in entries.items():
        full = full_tensor(value)
        is_tensor = isinstance(full, torch.Tensor)
        if is_sender and not stage:
            kept[key] = keep(full.detach()) if is_tensor else full
        elif is_sender and is_tensor:
            dist.send(full.detach().to(device).contiguous(), group_dst=0, group=group)
    if is_sender and not stage:
        for other in range(1, mesh["pp"].size()):
            kept.update(_receive(other, group, device, keep))
    return kept


def _receive(stage: int, group: Any, device: torch.device, keep: Callable[[torch.Tensor], Any]) -> dict[Any, Any]:
    announced: list[Any] = [None]
    dist.recv_object_list(announced, group_src=stage, group=group)
    received: dict[Any, Any] = {}
    for key, shape, dtype_or_value in announced[0]:
        if shape is None:
            received[key] = dtype_or_value
            continue
        tensor = torch.empty(shape, dtype=dtype_or_value, device=device)
        dist.recv(tensor, group_src=stage, group=group)
        received[key] = keep(tensor)
    return received


def rename_optimizer_state(state: State, names: Mapping[str, str], groups: list[list[str]]) -> State:
    """Return an optimizer's state under the names of the full model."""
    entries = {names[name]: value for name, value in state["state"].items() if name in names}
    return {
        "state": entries,
        "param_groups": [{**group, "params": name} for group, name in zip(state["param_groups"], groups, strict=True)],
    }


def local_optimizer_state(state: State, names: Mapping[str, str]) -> State:
    """Return the part of the full model's optimizer state that belongs to this rank's parameters."""
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [names[name] for name in group["params"] if name in names]})
    entries = {names[name]: value for name, value in state["state"].items() if name in names}
    return {"state": entries, "param_groups": groups}


def keep_empty_groups(optimizer: Optimizer, change: Callable[[], Any]) -> None:
    """Call what loads an optimizer's state; torch drops the settings of groups without parameters, so restore them."""
    empty = {index: dict(group) for index, group in enumerate(optimizer.param_groups) if not group["params"]}
    change()
    for index, settings in empty.items():
        optimizer.param_groups[index].update(settings)
