"""What a checkpoint consists of: the files of models, optimizers, schedulers, loaders, and random number generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_bigmodel.checkpoint.safetensors_writer import write_safetensors
from accel_data import SeedableRandomSampler, get_sampler
from accel_state.devices.base import Device

from ..checkpoint.names import (
    LOADER_NAME,
    OPTIMIZER_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    CheckpointError,
    custom_file,
    numbered,
    require_number,
    rng_file,
)
from ..checkpoint.safe_load import MANIFEST_MARK
from ..checkpoint.weights_io import MODEL_NAME, SAFE_MODEL_NAME, safetensors_content
from ..core.types import Part

_HOST_KEYS = ("random_state", "numpy_random_seed", "torch_manual_seed")


class WeightsPart(Part):
    """The weights of a model in the safetensors format."""

    write_value = staticmethod(write_safetensors)


@dataclass(frozen=True)
class TrainingObjects:
    """The objects whose state a checkpoint holds."""

    models: list[Any]  # the models, prepared or not
    optimizers: list[Any]  # torch's optimizers, not their wrappers
    schedulers: list[Any]  # the schedulers, not their wrappers
    dataloaders: list[Any]  # the prepared loaders
    seeded_samplers: Mapping[int, SeedableRandomSampler]  # see :func:`seeded_samplers`
    scaler: torch.amp.GradScaler | None = None  # the loss scaler
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
) -> list[Part]:
    """The files of a checkpoint. Every rank must call it."""
    parts: list[Part] = []
    for index, state_dict in enumerate(weights):
        if safe_serialization:
            name = numbered(SAFE_MODEL_NAME, index, "safetensors")
            parts.append(WeightsPart(name, safetensors_content(state_dict)))
        else:
            parts.append(Part(numbered(MODEL_NAME, index, "bin"), state_dict))
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
    if with_manifest:
        own[MANIFEST_MARK] = True
    parts.append(Part(rng_file(rank), own, each_rank=True))
    for index, obj in enumerate(objects.registered):
        parts.append(custom_part(index, obj))
    return parts


def custom_part(index: int, obj: Any) -> Part:
    """The file of a registered object."""
    return Part(custom_file(index), obj.state_dict(), f"the registered object {index} ({get_pretty_name(obj)})")


def get_pretty_name(obj: Any) -> str:
    """A name for an object in messages: its own, or that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def seeded_samplers(dataloaders: Sequence[Any]) -> dict[int, SeedableRandomSampler]:
    """The samplers whose order follows from a seed and the epoch, by the index of their loader."""
    samplers = {index: get_sampler(loader) for index, loader in enumerate(dataloaders)}
    return {index: sampler for index, sampler in samplers.items() if isinstance(sampler, SeedableRandomSampler)}


def capture_rng(device: Device) -> dict[str, Any]:
    """The state of the generators of python, numpy, torch and the device: tensors and plain values only."""
    kind, keys, *position = np.random.get_state()
    state: dict[str, Any] = {
        "random_state": random.getstate(),
        # As a list: an array that one version of numpy writes, another may not read.
        "numpy_random_seed": (kind, np.asarray(keys).tolist(), *position),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if device.name != "cpu":
        state[f"torch_{device.name}_manual_seed"] = device.get_rng_state_all()
        state["device_index"] = device.current().index or 0
    return state


def check_rng(state: Any, device: Device, path: Path) -> None:
    """Raise CheckpointError if generators cannot be restored to a state."""
    missing = set(_HOST_KEYS).difference(state if isinstance(state, dict) else ())
    if missing:
        names = ", ".join(key for key in _HOST_KEYS if key in missing)
        raise CheckpointError(f"{path} does not hold the state of random number generators: {names} missing.")
    try:
        random.Random().setstate(state["random_state"])
        np.random.RandomState().set_state(state["numpy_random_seed"])
        torch.Generator().set_state(state["torch_manual_seed"])
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} holds a damaged state of random number generators: {error}") from error
    if device.name == "cpu":
        return
    states = state.get(f"torch_{device.name}_manual_seed")
    if states is None:
        raise CheckpointError(
            f"{path} has no state of the generators of {device.name} devices: it was saved on another kind of device, "
            "so training cannot continue with the same random numbers. Load it on that kind, or load only the model."
        )
    index = require_number(state.get("device_index", 0), f"{path}: device_index")
    if not isinstance(states, (list, tuple)) or not (index < len(states) or len(states) == device.device_count()):
        raise CheckpointError(f"{path} holds a damaged state of the random number generators of {device.name} devices.")


def restore_rng(state: Any, device: Device, path: Path) -> None:
    """Restore the generators to a state of :func:`capture_rng`."""
    check_rng(state, device, path)
    try:
        random.setstate(state["random_state"])
        np.random.set_state(state["numpy_random_seed"])
        torch.set_rng_state(state["torch_manual_seed"])
        if device.name != "cpu":
            _restore_device_rng(state, device)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds a damaged state of random number generators: {error}") from error


def _restore_device_rng(state: dict[str, Any], device: Device) -> None:
    states = state[f"torch_{device.name}_manual_seed"]
    if len(states) == device.device_count():
        device.set_rng_state_all(states)
    else:  # this process sees another number of devices than when it was saved, and uses its own
        device.set_rng_state(states[state.get("device_index", 0)])


def seed_of_new_rank(base: Any, rank: int, path: Path) -> int:
    """The seed of a rank that did not exist when the state was saved."""
    state = base.get("torch_manual_seed") if isinstance(base, dict) else None
    if not isinstance(state, torch.Tensor):
        raise CheckpointError(f"{path} does not hold the state of random number generators: torch_manual_seed missing.")
    # Different for every rank and every state, the same whenever that state is loaded.
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def seed_new_rank(base: Any, rank: int, device: Device, path: Path) -> None:
    """Seed the generators of a rank that did not exist when the state was saved."""
    seed = seed_of_new_rank(base, rank, path)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    device.manual_seed_all(seed)
