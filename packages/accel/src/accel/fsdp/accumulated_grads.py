"""Gradients of sharded models within an accumulation window: gathered in full for a checkpoint, and resharded.

Unsynchronised gradients are full and differ between ranks; those reduced with every micro batch are sharded.
Synchronising averages over ranks, and the average of sums is the sum of averages: both are saved as their average,
which counts as reduced from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_state.collectives.single import Collectives

from .._torch_compat import drop_unreduced_gradients, shard_replicated, unreduced_gradients
from ..contract.accumulated_gradients import AccumulatedGradients
from ..core.fused_dtensor import full_tensor, pack, packed_shapes
from ..core.unwrap import clean_name

Gradients = dict[str, torch.Tensor]


def named_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, tied ones by their first name."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def average(tensor: torch.Tensor, collectives: Collectives) -> torch.Tensor:
    """Return the average of a tensor over ranks, in fp32 or wider."""
    total = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    return collectives.all_reduce(total).div_(collectives.world_size)


class ShardedGradients(AccumulatedGradients):
    """Gradients of models sharded by ``fully_shard``.

    Args:
        averaging: collectives over the ranks whose gradients are averaged.
        everyone: collectives over all ranks.
        holders: weak references to what holds the state of each parameter in ``fully_shard``.
    """

    def __init__(self, averaging: Collectives, everyone: Collectives, holders: Mapping[Any, weakref.ref[Any]]) -> None:
        super().__init__()
        self.averaging: Collectives = averaging
        self.everyone: Collectives = everyone
        self.holders = holders

    def drop(self, model: nn.Module) -> None:
        super().drop(model)
        for parameter in model.parameters():
            if parameter in self.holders:
                drop_unreduced_gradients(self.holders[parameter]())

    def shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        packed = packed_shapes(model)
        return {name: packed.get(name, parameter.shape) for name, parameter in named_once(model).items()}

    def gather(self, model: nn.Module) -> Gradients:
        shapes, named = packed_shapes(model), named_once(model)
        held = {name: self.holders[parameter]() for name, parameter in named.items() if parameter in self.holders}
        unreduced = {name: gradients for name, holder in held.items() if (gradients := unreduced_gradients(holder))}
        reduced = [name for name, parameter in named.items() if parameter.grad is not None]
        # A gradient that any rank has takes part of all ranks.
        announced = self.everyone.all_gather_object((sorted(unreduced), reduced))
        any_unreduced = {name for names, _ in announced for name in names}
        any_reduced = {name for _, names in announced for name in names}
        gathered: Gradients = {}
        for name, parameter in named.items():
            shape = shapes.get(name)
            parts = []
            if name in any_reduced:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                is_sharded = isinstance(gradient, DTensor)
                parts.append(full_tensor(pack(gradient, shape)) if is_sharded else average(gradient, self.averaging))
            if name in any_unreduced:
                total = torch.zeros(parameter.shape, device=parameter.device)
                for gradient in unreduced.get(name, ()):
                    total = total + full_tensor(gradient)
                parts.append(average(total, self.averaging))
            if parts and self.everyone.rank == 0:
                total = torch.stack([part.reshape(shape or parameter.shape) for part in parts]).sum(0)
                gathered[name] = total.detach()
        return gathered

    def put(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        self.drop(model)
        for name, parameter in named_once(model).items():
            gradient = gradients.get(name)
            if gradient is None:
                parameter.grad = None
                continue
            value = gradient.to(parameter.device, parameter.dtype, copy=True)
            if isinstance(parameter, DTensor):
                value = shard_replicated(value.reshape(parameter.shape), parameter.device_mesh, parameter.placements)
            parameter.grad = value
