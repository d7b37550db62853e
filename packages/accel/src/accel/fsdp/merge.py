"""Sharded weights into the files that everybody reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..checkpoint.names import FSDP_MODEL_NAME as MODEL_FOLDER
from ..checkpoint.names import SHARD_TABLE_NAME as METADATA_NAME
from ..checkpoint.weights_io import save_model_weights
from ..core.unwrap import clean_name
from .checkpoint.dcp_reader import read_shards, tensors_in


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    max_shard_size: int | str = "10GB",
) -> list[str]:
    """Merge the weights that SHARDED_STATE_DICT has written into ``model.safetensors`` (or ``pytorch_model.bin``).

    Large ones go into several files with an index.

    At most one of the files that are written is in memory at a time. In a script on several processes the main one
    works; all wait for it.

    Args:
        checkpoint_dir: the folder of a model's shards (``pytorch_model_fsdp_0``), or a checkpoint that has one.
        output_path: the folder to write to.
        safe_serialization: the safetensors format rather than torch's.
        remove_checkpoint_dir: remove the folder of the shards afterwards.
        max_shard_size: largest file in bytes, or as text such as "10GB".

    Returns:
        The names of the files that were written.

    Raises:
        CheckpointError: the shards are damaged, or reading them could run code.
        ConfigurationError: there are none.
    """
    state = PartialState()
    folder, target = _find(Path(checkpoint_dir)), Path(output_path)
    written: list[str] = []
    if state.is_main_process:
        written = _merge(folder, target, safe_serialization, max_shard_size)
        if remove_checkpoint_dir:
            shutil.rmtree(folder)
    state.wait_for_everyone()
    return written


def _find(path: Path) -> Path:
    """The folder of shards that is meant."""
    if (path / METADATA_NAME).is_file():
        return path
    inside = sorted(folder for folder in path.glob(f"{MODEL_FOLDER}_*") if (folder / METADATA_NAME).is_file())
    if len(inside) != 1:
        found = (
            f"has {', '.join(folder.name for folder in inside)}"
            if inside
            else f"has no {METADATA_NAME} and no {MODEL_FOLDER}_0"
        )
        raise ConfigurationError(
            f"{path} {found}. Give the folder of one model's shards, such as CHECKPOINT/{MODEL_FOLDER}_0."
        )
    return inside[0]


def _merge(folder: Path, target: Path, safe_serialization: bool, max_shard_size: int | str) -> list[str]:
    tensors = {clean_name(name): tensor for name, tensor in tensors_in(folder, "model").items()}

    def read(names: list[str]) -> dict[str, Any]:
        chosen = set(names)

        def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.empty(size, dtype=dtype) if clean_name(".".join(map(str, path))) in chosen else None

        found = read_shards(folder, like, "model")
        return {clean_name(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}

    target.mkdir(parents=True, exist_ok=True)
    return save_model_weights(tensors, target, max_shard_size, safe_serialization, read)
