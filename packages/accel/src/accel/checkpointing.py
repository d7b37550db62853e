"""Writing and reading the parts of a state. The Accelerator's ``save_state`` and ``load_state`` make a whole of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accel_state import PartialState

from .checkpoint import weights_io
from .checkpoint.contents import collect, custom_part, of_this_rank
from .checkpoint.contents import get_pretty_name as get_pretty_name
from .checkpoint.loader import StateReader
from .checkpoint.safe_load import check_readable, custom_file, read
from .checkpoint.weights_io import load as load
from .checkpoint.weights_io import save as save
from .core.types import Part


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
    """Write the state of a training run into a folder. Every rank must call it; each writes its own random number
    generators.

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
    parts = collect(model_states, optimizers, schedulers, dataloaders, process_index, step, scaler, safe_serialization)
    for part in of_this_rank(parts, _writes(save_on_each_node)):
        _write(part, folder)
    return folder


def _writes(save_on_each_node: bool) -> bool:
    process = PartialState()
    return process.is_local_main_process if save_on_each_node else process.is_main_process


def _write(part: Part, folder: Path) -> None:
    weights_io.write_atomically(folder / part.name, lambda target: part.write_value(part.value, target))
    if part.what:
        check_readable(folder / part.name, part.what)


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
        CheckpointError: files are missing or damaged, there is another number of some kind of object, or the state of
            the random number generators is missing or unusable.
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
    part = custom_part(index, obj)
    if _writes(save_on_each_node):
        _write(part, Path(path))


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
