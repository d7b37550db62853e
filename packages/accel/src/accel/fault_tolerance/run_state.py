"""The state of a run after its latest committed step, as a replica that joins gets it from another one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel_data.replica_loader import ReplicaLoader
from accel_state.errors import ConfigurationError
from accel_state.humanize import counted

from ..core.local_part import local


def capture(accelerator: Any) -> dict[str, Any]:
    """Everything that decides how training continues: tensors, numbers, texts and containers of them.

    Parameters and optimizer states are not copied; they do not change until the next step is committed. Buffers may
    change in a forward pass.
    """
    # A thread of torchft calls this, and its stream is not ordered after that of the loop.
    process = accelerator.process_state
    process.device_backend.set_current(process.device)
    process.device_backend.synchronize()
    prepared, checkpointer = accelerator.prepared, accelerator._checkpointer
    return {
        "models": [_weights(model) for model in prepared.models],
        "optimizers": [_local(optimizer.optimizer.state_dict()) for optimizer in prepared.optimizers],
        "steps": [optimizer.steps_taken for optimizer in prepared.optimizers],
        "schedulers": [scheduler.scheduler.state_dict() for scheduler in prepared.schedulers],
        "positions": [
            loader.position if isinstance(loader, ReplicaLoader) else None for loader in prepared.dataloaders
        ],
        "orders": {index: sampler.initial_seed for index, sampler in prepared.seeded_samplers.items()},
        "averages": [average.capture() for average in prepared.averages],
        "registered": [item.state_dict() for item in checkpointer.custom_objects],
        "checkpoints": checkpointer.project.iteration,
    }


def restore(accelerator: Any, state: dict[str, Any]) -> None:
    """Load a state of :func:`capture`."""
    prepared, checkpointer = accelerator.prepared, accelerator._checkpointer
    if len(prepared.averages) != len(state["averages"]):
        raise ConfigurationError(
            f"this replica joined with {counted(len(prepared.averages), 'moving average')}, and the others have "
            f"{len(state['averages'])}. Call moving_average(model) on every replica before accelerator.resume() and "
            "before the first batch."
        )
    for model, weights in zip(prepared.models, state["models"], strict=True):
        with torch.no_grad():
            for name, value in model.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    local(value).copy_(weights[name])
    for optimizer, values, steps in zip(prepared.optimizers, state["optimizers"], state["steps"], strict=True):
        optimizer.optimizer.load_state_dict(_sharded(values, optimizer.optimizer))
        optimizer.steps_taken = steps
    for scheduler, values in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.scheduler.load_state_dict(values)
        scheduler.note_steps()
    for index, seed in state["orders"].items():
        prepared.seeded_samplers[index].initial_seed = seed
    for loader, position in zip(prepared.dataloaders, state["positions"], strict=True):
        if isinstance(loader, ReplicaLoader):
            loader.move_to(position)
    for average, values in zip(prepared.averages, state["averages"], strict=True):
        average.restore(values)
    for item, values in zip(checkpointer.custom_objects, state["registered"], strict=True):
        item.load_state_dict(values)
    checkpointer.project.iteration = state["checkpoints"]
    # Its steps are those of the run from here on, and none of them is computed again.
    if accelerator._monitor is not None:
        accelerator._monitor.loaded()


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    buffers = set(map(id, model.buffers()))
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        own = _local(value.detach() if isinstance(value, torch.Tensor) else value)
        weights[name] = own.clone() if id(value) in buffers else own
    return weights


def _local(value: Any) -> Any:
    """Return a state with this process's part of each tensor."""
    if isinstance(value, torch.Tensor):
        return local(value)
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return value


def _sharded(values: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer from :func:`_local`, with the parts of sharded parameters as sharded tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def shard(parameter: torch.Tensor, item: Any) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(item, torch.Tensor) or not item.ndim:
            return item
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(item, mesh, placements, run_check=False, shape=shape, stride=stride)

    state = {
        index: {name: shard(parameters[index], item) for name, item in of_parameter.items()}
        for index, of_parameter in values["state"].items()
    }
    return {**values, "state": state}
