"""The training steps of a plan: the second one is followed, because the first one makes the optimizer's state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from ._torch_compat import fsdp2_accumulated_gradient, fsdp2_units, local_tensor
from .memory import CLIPPING, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCTION, STEP, MemoryTracker, StepMemory
from .world import ReplicatedModel

_CLASSES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd_momentum": torch.optim.SGD,
}


class ShardOptimizer:
    """An optimizer over this rank's shards of a model, which does what one over its DTensors does, without their rules.

    DTensors derive a layout for each operation on all of them, which takes longer than all else in a step.

    Args:
        name, implementation: of the optimizer, as of :func:`build_optimizer`.
        parameters: of the prepared model.
    """

    def __init__(self, name: str, implementation: str, parameters: Iterable[torch.Tensor]) -> None:
        self.shards: dict[torch.Tensor, torch.Tensor] = {parameter: parameter for parameter in parameters}
        meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in self.shards}
        # DTensors of several meshes are not updated together; those that are alike are.
        if len(meshes) == 1 and None not in meshes:
            for parameter in self.shards:
                self.shards[parameter] = nn.Parameter(local_tensor(parameter).detach(), parameter.requires_grad)
        self.optimizer: torch.optim.Optimizer = build_optimizer(name, implementation, self.shards.values())

    def step(self) -> None:
        """Update the shards."""
        for parameter, shard in self.shards.items():
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad()
        for parameter in self.shards:
            parameter.grad = None


def build_optimizer(name: str, implementation: str, parameters: Iterable[torch.Tensor]) -> Optimizer:
    """Return an optimizer of a plan.

    ``implementation`` is one of torch's: "for_loop", one parameter after the other; "foreach", all parameters in each
    operation; or "fused", one kernel for all.
    """
    settings: dict[str, Any] = {"momentum": 0.9} if name == "sgd_momentum" else {}
    chosen = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    return _CLASSES[name](parameters, lr=1e-3, **chosen, **settings)


def implementation_for(asked: str | None, parameters: Iterable[torch.Tensor]) -> str:
    """Return the implementation that an optimizer of these parameters uses.

    Args:
        asked: None for torch's default on accelerators, as accel changes it where only some parameters are DTensors.
        parameters: of the prepared model.

    Raises:
        ConfigurationError: ``foreach`` was asked for, and only some of the parameters are DTensors.
    """
    sharded = [isinstance(parameter, DTensor) for parameter in parameters]
    mixed = any(sharded) and not all(sharded)
    if asked is None:
        return "for_loop" if mixed else "foreach"
    if mixed and asked == "foreach":
        raise ConfigurationError(
            f"--optimizer_implementation foreach: it cannot update {sum(sharded)} sharded parameters together with "
            f"{len(sharded) - sum(sharded)} others. Use for_loop, the default here."
        )
    return asked


def follow_steps(
    accelerator: Any, model: nn.Module, optimizer: ShardOptimizer, tracker: MemoryTracker, passes: Callable[[], None]
) -> StepMemory:
    """Take a step of the optimizer, which makes its state, and follow the whole step after it.

    Args:
        accelerator: prepared ``model``.
        model: the prepared model.
        optimizer: over the parameters of the prepared model. Preparing it would not change its memory.
        tracker: follows storages.
        passes: runs the forward and backward passes of a step.
    """
    _categorize_model(model, tracker)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    _update(accelerator, model, optimizer, tracker)
    gc.collect()  # what splitting and wrapping a model left
    tracker.start()
    passes()
    _update(accelerator, model, optimizer, tracker)
    return tracker.stop()


def _update(accelerator: Any, model: nn.Module, optimizer: ShardOptimizer, tracker: MemoryTracker) -> None:
    """Clip the gradients and step, as a training loop does."""
    tracker.begin_pass(1)
    tracker.enter(CLIPPING)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tracker.categorize([parameter.grad], GRADIENTS, "gradient", tracker.name_of(name))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    tracker.enter(STEP)
    optimizer.step()
    _categorize_state(model, optimizer, tracker)
    optimizer.zero_grad()


def categorize_unreduced(model: nn.Module, tracker: MemoryTracker) -> None:
    """Gradients that fully_shard accumulates whole, between micro batches."""
    for module in model.modules():
        for unit in fsdp2_units(module) if isinstance(module, FSDPModule) else ():
            gradients = [gradient for gradient in map(fsdp2_accumulated_gradient, unit) if gradient is not None]
            tracker.categorize(gradients, REDUCTION, "whole gradient")


def _categorize_model(model: nn.Module, tracker: MemoryTracker) -> None:
    for name, parameter in model.named_parameters():
        tracker.categorize([parameter], PARAMETERS, "parameter", tracker.name_of(name))
    for name, buffer in model.named_buffers():
        tracker.categorize([buffer], PARAMETERS, "buffer", tracker.name_of(name))
    for module in model.modules():
        if isinstance(module, ReplicatedModel):
            names = {id(parameter): tracker.name_of(name) for name, parameter in module.named_parameters()}
            for key, bucket in module.buckets.items():
                tracker.categorize([bucket], REDUCTION, "bucket", names[id(key)])


def _categorize_state(model: nn.Module, optimizer: ShardOptimizer, tracker: MemoryTracker) -> None:
    names = {id(parameter): tracker.name_of(name) for name, parameter in model.named_parameters()}
    for parameter, shard in optimizer.shards.items():
        for name, value in optimizer.optimizer.state.get(shard, {}).items():
            if isinstance(value, torch.Tensor):
                tracker.categorize([value], OPTIMIZER, name, names.get(id(parameter), ""))
