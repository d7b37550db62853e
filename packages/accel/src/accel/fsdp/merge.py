"""Merges sharded weights into safetensors files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.names import FSDP_MODEL_NAME, SHARD_TABLE_NAME
from accel_checkpoint.sharded.reader import read_shards, tensors_in
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.paths import as_path, refuse_link

from ..core.unwrap import clean_name
from ..core.weights_io import check_shard_size, save_model_weights


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    max_shard_size: int | str = "10GB",
) -> list[str]:
    """Merge weights saved with SHARDED_STATE_DICT into ``model.safetensors`` (or ``pytorch_model.bin``).

    Large weights are split over several files with an index. At most one output file is in memory at a time. In a
    script on several processes the main one works, and all wait for it.

    Args:
        checkpoint_dir: the directory of a model's shards (``pytorch_model_fsdp_0``), or a checkpoint that has one.
        output_path: the directory to write to.
        safe_serialization: write the safetensors format rather than torch's.
        remove_checkpoint_dir: remove the directory of the shards afterwards.
        max_shard_size: largest file in bytes, or as text such as "10GB".

    Returns:
        The names of the files that were written.

    Raises:
        CheckpointError: the shards are damaged, or reading them could run code.
        ConfigurationError: there are none.
    """
    state = PartialState()
    check_shard_size(max_shard_size)
    target = as_path("output_path", output_path)
    directory = _find_shards(as_path("checkpoint_dir", checkpoint_dir))
    written: list[str] = []
    if remove_checkpoint_dir:
        refuse_link(directory)
    if state.is_main_process:
        written = _merge(directory, target, safe_serialization, max_shard_size)
        if remove_checkpoint_dir:
            shutil.rmtree(directory)
    state.wait_for_everyone()
    return written


def _find_shards(path: Path) -> Path:
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist (looked in {Path.cwd()}). Give a checkpoint of FSDP.")
    if (path / SHARD_TABLE_NAME).is_file():
        return path
    inside = sorted(item for item in path.glob(f"{FSDP_MODEL_NAME}_*") if (item / SHARD_TABLE_NAME).is_file())
    if len(inside) == 1:
        return inside[0]
    content = f"has no {SHARD_TABLE_NAME} and no {FSDP_MODEL_NAME}_0"
    if inside:
        content = f"has {', '.join(item.name for item in inside)}"
    raise ConfigurationError(
        f"{path.resolve()} {content}. Give the directory of one model's shards, such as CHECKPOINT/{FSDP_MODEL_NAME}_0."
    )


def _merge(directory: Path, target: Path, safe_serialization: bool, max_shard_size: int | str) -> list[str]:
    tensors = {clean_name(name): tensor for name, tensor in tensors_in(directory, "model").items()}

    def read(names: list[str]) -> dict[str, Any]:
        chosen = set(names)

        def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.empty(size, dtype=dtype) if clean_name(".".join(map(str, path))) in chosen else None

        state = read_shards(directory, like, "model")
        return {clean_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}

    target.mkdir(parents=True, exist_ok=True)
    return save_model_weights(tensors, target, max_shard_size, safe_serialization, read)
