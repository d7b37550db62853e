"""Functions that write and read the parts of a state; ``Accelerator.save_state`` saves a complete one atomically."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.atomic_file import write_atomically
from accel_checkpoint.names import custom_file
from accel_checkpoint.parts import Part
from accel_checkpoint.safe_load import check_readable, read
from accel_checkpoint.validation import apply_changes
from accel_state import PartialState
from accel_state.paths import as_path

from .checkpointer.contents import TrainingObjects, collect, custom_part, seeded_samplers
from .checkpointer.contents import get_pretty_name as get_pretty_name
from .checkpointer.loader import StateReader
from .core.weights_io import load as load
from .core.weights_io import save as save


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
    """Write the state of a training run into a directory. Every rank must call it; each writes its own generators.

    Args:
        output_dir: the directory; files of an earlier state in it are replaced one by one.
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
        The directory.

    Raises:
        CheckpointError: a state dict holds values that could not be loaded again without running code.
        ConfigurationError: weights that safetensors cannot hold.
    """
    directory = as_path("output_dir", output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    objects = TrainingObjects([], optimizers, schedulers, dataloaders, seeded_samplers(dataloaders), scaler)
    device = PartialState().device_backend
    for part in collect(objects, model_states, optimizers, process_index, step, device, safe_serialization):
        if part.each_rank or _is_writer(save_on_each_node):
            _write(part, directory)
    return directory


def _is_writer(save_on_each_node: bool) -> bool:
    process = PartialState()
    return process.is_local_main_process if save_on_each_node else process.is_main_process


def _write(part: Part, directory: Path) -> None:
    write_atomically(directory / part.name, partial(_write_to, part))
    if part.what:
        check_readable(directory / part.name, part.value, part.what)


def _write_to(part: Part, path: str) -> None:
    with open(path, "wb") as file:
        part.write_value(part.value, file)


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
    """Load a state of :func:`save_accelerator_state`. Nothing is changed before all of it has been read.

    Args:
        input_dir: the directory.
        models: models, prepared or not.
        optimizers: the optimizers.
        schedulers: the schedulers.
        dataloaders: prepared loaders, which continue where they were.
        process_index: the rank.
        scaler: the loss scaler.
        map_location: where tensors are read to: "cpu" (the default), "on_device", or as in ``torch.load``.
        load_kwargs: for ``torch.load`` of everything but weights; ``weights_only`` is on unless given.
        **load_model_func_kwargs: for ``load_state_dict`` of the models, such as ``strict=False``.

    Returns:
        ``{"step": micro batches in the open accumulation window}``.

    Raises:
        CheckpointError: files are missing or damaged, there is another number of some kind of object, or the state of
            the random number generators is missing or unusable.
    """
    reader = StateReader(as_path("input_dir", input_dir), PartialState(), map_location, load_kwargs, rank=process_index)
    with reader.verifying():
        pass  # before anything is read
    objects = TrainingObjects(models, optimizers, schedulers, dataloaders, seeded_samplers(dataloaders), scaler)
    reader.read_state(objects, models, load_model_func_kwargs)
    apply_changes(reader.reversible, reader.collective, reader.changes, nullcontext)
    reader.restore_rng()
    return {"step": int(reader.own.get("step", 0))}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the ``state_dict()`` of a registered object.

    Args:
        obj: the object.
        path: the directory.
        index: its index among the registered objects.
        save_on_each_node: write on every node.

    Raises:
        CheckpointError: the state holds values that could not be loaded again without running code.
    """
    part = custom_part(index, obj)
    if _is_writer(save_on_each_node):
        _write(part, as_path("path", path))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load a state of :func:`save_custom_state`.

    Args:
        obj: the object.
        path: the directory.
        index: its index among the registered objects.

    Raises:
        CheckpointError: the file is missing or damaged, or reading it could run code.
    """
    obj.load_state_dict(read(as_path("path", path) / custom_file(index)))
