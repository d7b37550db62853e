"""Merges sharded weights into safetensors files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.names import FSDP_MODEL_NAME, SHARD_TABLE_NAME
from accel_checkpoint.remote.catalog import read_manifest
from accel_checkpoint.remote.reading import RemoteCheckpoint
from accel_checkpoint.sharded.reader import Source, read_shards, tensors_in
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location, refuse_link
from accel_state.storage.transfer import written_directory
from accel_state.storage.url import Location, RemotePath

from ..core.unwrap import clean_name
from ..core.weights_io import check_shard_size, is_weights_file, save_model_weights


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
        checkpoint_dir: the directory of a model's shards (``pytorch_model_fsdp_0``), or a checkpoint that has one; also
            as a URL.
        output_path: the directory to write to, or a URL.
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
    target, place = as_location("output_path", output_path), as_location("checkpoint_dir", checkpoint_dir)
    if remove_checkpoint_dir and isinstance(place, RemotePath):
        raise ConfigurationError(f"remove_checkpoint_dir=True removes directories only, and {place} is a URL.")
    written: list[str] = []
    if state.is_main_process or not isinstance(place, RemotePath):
        with _shards(place) as (directory, source):
            if remove_checkpoint_dir:
                refuse_link(directory)
            if state.is_main_process:
                with written_directory(target, is_weights_file) as output:
                    written = _merge(directory, output, safe_serialization, max_shard_size, source)
                if remove_checkpoint_dir:
                    shutil.rmtree(directory)
    state.wait_for_everyone()
    return written


@contextmanager
def _shards(place: Location) -> Iterator[tuple[Path, Callable[[], Source | None]]]:
    """Yield the directory of a model's shards, or of its metadata, and what makes a reader of the files."""
    if not isinstance(place, RemotePath):
        yield _find_shards(place), lambda: None
        return
    is_inside = read_manifest(place) is None
    checkpoint = RemoteCheckpoint(place.parent if is_inside else place)
    with tempfile.TemporaryDirectory(prefix="accel-merge-") as folder:
        checkpoint.copy_to(Path(folder))
        directory = _find_shards(Path(folder, place.name) if is_inside else Path(folder))
        yield directory, lambda: checkpoint.source(directory.name)


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


def _merge(
    directory: Path,
    target: Path,
    safe_serialization: bool,
    max_shard_size: int | str,
    source: Callable[[], Source | None],
) -> list[str]:
    tensors = {clean_name(name): tensor for name, tensor in tensors_in(directory, "model").items()}

    def read(names: list[str]) -> dict[str, Any]:
        chosen = set(names)

        def like(path: tuple[Any, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
            return torch.empty(size, dtype=dtype) if clean_name(".".join(map(str, path))) in chosen else None

        state = read_shards(directory, like, "model", source())
        return {clean_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}

    return save_model_weights(tensors, target, max_shard_size, safe_serialization, read)
