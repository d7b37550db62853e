"""The state of a run after its latest committed step, as a replica that joins gets it from another one."""

from __future__ import annotations

from typing import Any

import torch

from accel_data.dealt import DealtLoader


def capture(accelerator: Any) -> dict[str, Any]:
    """Everything that decides how training goes on: tensors, numbers, texts and containers of them.

    Parameters and optimizer states are not copied; they do not change until the next step is committed. Buffers may
    change in a forward pass.
    """
    prepared, checkpointer = accelerator.prepared, accelerator._checkpointer
    return {
        "models": [_weights(model) for model in prepared.models],
        "optimizers": [optimizer.optimizer.state_dict() for optimizer in prepared.optimizers],
        "steps": [optimizer.steps_taken for optimizer in prepared.optimizers],
        "schedulers": [scheduler.scheduler.state_dict() for scheduler in prepared.schedulers],
        "positions": [loader.position if isinstance(loader, DealtLoader) else None for loader in prepared.dataloaders],
        "orders": {index: sampler.initial_seed for index, sampler in prepared.seeded_samplers.items()},
        "registered": [item.state_dict() for item in checkpointer.custom_objects],
        "checkpoints": checkpointer.project.iteration,
    }


def restore(accelerator: Any, state: dict[str, Any]) -> None:
    """Load a state of :func:`capture`."""
    prepared, checkpointer = accelerator.prepared, accelerator._checkpointer
    for model, weights in zip(prepared.models, state["models"], strict=True):
        model.load_state_dict(weights)
    for optimizer, values, steps in zip(prepared.optimizers, state["optimizers"], state["steps"], strict=True):
        optimizer.optimizer.load_state_dict(values)
        optimizer.steps_taken = steps
    for scheduler, values in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.scheduler.load_state_dict(values)
    for index, seed in state["orders"].items():
        prepared.seeded_samplers[index].initial_seed = seed
    for loader, position in zip(prepared.dataloaders, state["positions"], strict=True):
        if isinstance(loader, DealtLoader):
            loader.move_to(position)
    for item, values in zip(checkpointer.custom_objects, state["registered"], strict=True):
        item.load_state_dict(values)
    checkpointer.project.iteration = state["checkpoints"]


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    buffers = {id(buffer) for buffer in model.buffers()}
    state = model.state_dict(keep_vars=True)
    return {
        name: value.detach().clone() if id(value) in buffers else getattr(value, "detach", lambda value=value: value)()
        for name, value in state.items()
    }
