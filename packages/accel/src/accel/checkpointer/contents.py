"""What a checkpoint consists of: the files of models, optimizers, schedulers, loaders, and random number generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_checkpoint.names import (
    LOADER_NAME,
    OPTIMIZER_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    custom_file,
    numbered,
    rng_file,
)
from accel_checkpoint.parts import Part, WeightsPart
from accel_checkpoint.rng_state import capture_rng
from accel_checkpoint.safe_load import MANIFEST_MARK
from accel_data import SeedableRandomSampler, get_sampler
from accel_state import PartialState
from accel_state.devices.base import Device
from accel_state.errors import ConfigurationError
from accel_state.safetensors_writer import safetensors_content

from ..core.weights_io import MODEL_NAME, SAFE_MODEL_NAME, average_part


@dataclass(frozen=True)
class TrainingObjects:
    """The objects whose state a checkpoint holds."""

    models: list[Any]  # the models, prepared or not
    optimizers: list[Any]  # torch's optimizers, not their wrappers
    schedulers: list[Any]  # the schedulers, not their wrappers
    dataloaders: list[Any]  # the prepared loaders
    seeded_samplers: Mapping[int, SeedableRandomSampler]  # see :func:`seeded_samplers`
    scaler: torch.amp.GradScaler | None = None  # the loss scaler
    local_sgd: Any = None  # the LocalSGD whose block runs
    averages: Sequence[Any] = ()  # the moving averages of models
    registered: Sequence[Any] = ()  # the objects of ``register_for_checkpointing``


def collect(
    objects: TrainingObjects,
    weights: Sequence[dict[str, Any]],
    optimizers: Sequence[Any],
    rank: int,
    step: int,
    device: Device,
    safe_serialization: bool,
    with_manifest: bool = False,
    averages: Sequence[dict[str, Any]] = (),
) -> list[Part]:
    """Return the files of a checkpoint. Every rank must call it."""
    parts: list[Part] = []
    for index, state_dict in enumerate(weights):
        if safe_serialization:
            name = numbered(SAFE_MODEL_NAME, index, "safetensors")
            parts.append(WeightsPart(name, safetensors_content(state_dict)))
        else:
            parts.append(Part(numbered(MODEL_NAME, index, "bin"), state_dict))
    for index, state_dict in enumerate(averages):
        parts.append(average_part(index, state_dict))
    for stem, group in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, objects.schedulers)):
        for index, obj in enumerate(group):
            parts.append(Part(numbered(stem, index, "bin"), obj.state_dict(), f"{stem} {index}"))
    positions = {}
    for index, loader in enumerate(objects.dataloaders):
        sampler = objects.seeded_samplers.get(index)
        if sampler is not None:
            seed = {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}
            parts.append(Part(numbered(SAMPLER_NAME, index, "bin"), seed))
        if hasattr(loader, "state_dict"):
            positions[index] = loader.state_dict()
            parts.append(Part(numbered(LOADER_NAME, index, "bin"), positions[index], f"dataloader {index}"))
    if objects.scaler is not None:
        parts.append(Part(SCALER_NAME, objects.scaler.state_dict()))
    # Besides the position, a loader's state has the generators of this rank, so every rank keeps its own.
    own = {"step": step, **capture_rng(device), "dataloaders": positions}
    for index, model in enumerate(objects.models):
        hook = model.save_comm_hook() if hasattr(model, "save_comm_hook") else None
        if hook is not None:
            own.setdefault("comm_hooks", {})[index] = hook
    if hasattr(objects.local_sgd, "local_sgd_steps"):
        own["local_sgd"] = objects.local_sgd.state_dict()
    if objects.averages:
        own["averages"] = [average.num_updates for average in objects.averages]
    if with_manifest:
        own[MANIFEST_MARK] = True
    parts.append(Part(rng_file(rank), own, each_rank=True, is_small=own.keys().isdisjoint(("comm_hooks", "local_sgd"))))
    for index, obj in enumerate(objects.registered):
        parts.append(custom_part(index, obj))
    return parts


def custom_part(index: int, obj: Any) -> Part:
    """Return the file of a registered object."""
    return Part(custom_file(index), obj.state_dict(), f"the registered object {index} ({get_pretty_name(obj)})")


def get_pretty_name(obj: Any) -> str:
    """Return a name for an object in messages: its own, or that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def seeded_samplers(dataloaders: Sequence[Any]) -> dict[int, SeedableRandomSampler]:
    """Return the samplers whose order follows from a seed and the epoch, by the index of their loader."""
    samplers = {index: get_sampler(loader) for index, loader in enumerate(dataloaders)}
    return {index: sampler for index, sampler in samplers.items() if isinstance(sampler, SeedableRandomSampler)}


def refuse_each_node(state: PartialState, each_node: bool) -> None:
    """Refuse to save a model on each of several nodes if it is sharded over all of their ranks."""
    if each_node and state.environment.num_nodes > 1:
        raise ConfigurationError(
            f"save_on_each_node=True saves everything on each node, and this model is sharded over the ranks of "
            f"{state.environment.num_nodes} nodes. Save to a file system that all nodes share, without "
            "save_on_each_node."
        )


class EmptyWeightsError(ConfigurationError, RuntimeError):
    """A model is to be saved whose weights are on the meta device."""


def refuse_unsavable(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuse to save a model if some of its tensors have no values."""
    empty = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            empty.append(name)
    if empty:
        raise EmptyWeightsError(
            f"{type(model).__name__} cannot be saved: {len(empty)} tensors have no values (they are on the meta "
            f"device), among them {', '.join(empty[:3])}. Load its weights first."
        )
