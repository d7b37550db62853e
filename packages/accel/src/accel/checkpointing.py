"""Writing and reading the parts of a state. The Accelerator's ``save_state`` and ``load_state`` make a whole of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accel_data import SeedableRandomSampler, get_sampler
from accel_state import PartialState

from . import rng_state, saving
from .checkpoint_files import (
    LOADER_NAME,
    OPTIMIZER_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    check_readable,
    custom_file,
    numbered,
    read,
    rng_file,
)
from .saving import load as load
from .saving import save as save
from .state_reading import StateReader


def get_pretty_name(obj: Any) -> str:
    """A name for an object in messages: its own, or that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the state of a training run into a folder. Every rank must call it; each writes its own random number generators.

    Args:
        output_dir: the folder; files of an earlier state in it are replaced one by one.
        model_states: the state dict of each model.
        optimizers: the optimizers.
        schedulers: the schedulers.
        dataloaders: prepared loaders, whose positions are saved.
        process_index: the rank.
        step: micro batches in the open accumulation window.
        scaler: the loss scaler.
        save_on_each_node: write on every node, for file systems that the nodes do not share.
        safe_serialization: weights in the safetensors format rather than torch's.

    Returns:
        The folder.

    Raises:
        CheckpointError: a state dict holds what could not be loaded again without running code.
        ConfigurationError: weights that safetensors cannot hold.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for index, weights in enumerate(model_states):
        name = _weights_file(index, safe_serialization)
        saving.save(weights, folder / name, save_on_each_node, safe_serialization)
    for stem, objects in ((OPTIMIZER_NAME, optimizers), (SCHEDULER_NAME, schedulers)):
        for index, obj in enumerate(objects):
            _save_checked(obj.state_dict(), folder / numbered(stem, index, "bin"), f"{stem} {index}", save_on_each_node)
    positions = _save_loaders(folder, dataloaders, save_on_each_node)
    if scaler is not None:
        saving.save(scaler.state_dict(), folder / SCALER_NAME, save_on_each_node)
    # Beyond the position, a loader's state has generators, which are this rank's own; so each rank keeps all of it.
    own = {"step": step, **rng_state.capture(PartialState().device_backend), "dataloaders": positions}
    saving.write_atomically(folder / rng_file(process_index), lambda target: torch.save(own, target))
    return folder


def _weights_file(index: int, safe_serialization: bool) -> str:
    return numbered(saving.SAFE_MODEL_NAME, index, "safetensors") if safe_serialization else numbered(saving.MODEL_NAME, index, "bin")


def _save_loaders(folder: Path, dataloaders: list[Any], save_on_each_node: bool) -> dict[int, dict[str, Any]]:
    positions: dict[int, dict[str, Any]] = {}
    for index, loader in enumerate(dataloaders):
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler):
            seed = {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}
            saving.save(seed, folder / numbered(SAMPLER_NAME, index, "bin"), save_on_each_node)
        if hasattr(loader, "state_dict"):
            positions[index] = loader.state_dict()
            _save_checked(positions[index], folder / numbered(LOADER_NAME, index, "bin"), f"dataloader {index}", save_on_each_node)
    return positions


def _save_checked(state: Any, path: Path, what: str, save_on_each_node: bool) -> None:
    saving.save(state, path, save_on_each_node)
    process = PartialState()
    if process.is_local_main_process if save_on_each_node else process.is_main_process:
        check_readable(path, what)


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Put a state of :func:`save_accelerator_state` back. Nothing is changed before all of it has been read.

    Args:
        input_dir: the folder.
        models: models, prepared or not.
        optimizers: the optimizers.
        schedulers: the schedulers.
        dataloaders: prepared loaders; they go on where they were.
        process_index: the rank.
        scaler: the loss scaler.
        map_location: where tensors are read to: "cpu" (the default), "on_device", or as in ``torch.load``.
        load_kwargs: for ``torch.load`` of everything but weights; ``weights_only`` is on unless given.
        **load_model_func_kwargs: for ``load_state_dict`` of the models, such as ``strict=False``.

    Returns:
        ``{"step": micro batches in the accumulation window that was open}``.

    Raises:
        CheckpointError: files are missing or damaged, there is another number of some kind of object, or the state of the random
            number generators is missing or unusable.
    """
    reader = StateReader(Path(input_dir), process_index, map_location, load_kwargs)
    reader.verify()
    reader.read_all(models, optimizers, schedulers, dataloaders, scaler, load_model_func_kwargs)
    reader.apply()
    reader.restore_rng()
    return {"step": reader.step}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the ``state_dict()`` of a registered object.

    Args:
        obj: the object.
        path: the folder.
        index: its place among the registered objects.
        save_on_each_node: write on every node.

    Raises:
        CheckpointError: the state holds what could not be loaded again without running code.
    """
    what = f"the registered object {index} ({get_pretty_name(obj)})"
    _save_checked(obj.state_dict(), Path(path) / custom_file(index), what, save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Put a state of :func:`save_custom_state` back.

    Args:
        obj: the object.
        path: the folder.
        index: its place among the registered objects.

    Raises:
        CheckpointError: the file is missing or damaged, or reading it could run code.
    """
    obj.load_state_dict(read(Path(path) / custom_file(index)))
