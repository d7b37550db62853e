"""Writing weights and objects so that no reader sees a partly written file, and reading them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.atomic_file import write_atomically
from accel_checkpoint.names import AVERAGE_NAME, numbered
from accel_checkpoint.parts import Part, WeightsPart
from accel_checkpoint.safe_load import read_safetensors
from accel_checkpoint.staging import without_unsavable
from accel_state import PartialState
from accel_state.arguments import check_flag
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.humanize import convert_file_size_to_int
from accel_state.paths import as_path
from accel_state.safetensors_writer import clean_state_dict_for_safetensors, safetensors_content, write_safetensors

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
_WEIGHTS_FILE = re.compile(
    rf"({MODEL_NAME}(-\d+-of-\d+)?\.bin|{SAFE_MODEL_NAME}(-\d+-of-\d+)?\.safetensors)(\.index\.json)?"
)


def average_part(index: int, state: dict[str, Any]) -> Part:
    """Return the file of a moving average with whole tensors."""
    return WeightsPart(numbered(AVERAGE_NAME, index, "safetensors"), safetensors_content(state))


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object once: on the main process, or on that of each node.

    Args:
        obj: anything that torch can save; with ``safe_serialization`` a dictionary of tensors.
        f: a path, or an open binary file.
        save_on_each_node: write on every node, for file systems that the nodes do not share.
        safe_serialization: write the safetensors format.

    Raises:
        ConfigurationError: an object that safetensors cannot hold.
    """
    check_flag("save_on_each_node", save_on_each_node)
    check_flag("safe_serialization", safe_serialization)
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if isinstance(f, (str, os.PathLike)):
        write_atomically(as_path("f", f), _writer(obj, safe_serialization))
    elif not hasattr(f, "write"):
        raise ArgumentTypeError(f"save(f={f!r}) got a {type(f).__name__}. Give a path, or an open binary file.")
    elif safe_serialization:
        write_safetensors(safetensors_content(obj), f)
    else:
        torch.save(without_unsavable(obj), f)


def _writer(obj: Any, safe_serialization: bool) -> Callable[[str], None]:
    if not safe_serialization:
        savable = without_unsavable(obj)
        return lambda path: torch.save(savable, path)
    content = safetensors_content(obj)

    def write(path: str) -> None:
        with open(path, "wb") as file:
            write_safetensors(content, file)

    return write


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what :func:`save` wrote, without running code from the file.

    Args:
        f: a path or an open binary file; names ending in ``.safetensors`` are read as such.
        map_location: where to put tensors, as in ``torch.load``.
        **kwargs: for ``torch.load``; ``weights_only`` is on unless given.

    Raises:
        ConfigurationError: ``f`` is neither.
    """
    if not hasattr(f, "read"):
        f = as_path("f", f)
    if isinstance(f, Path) and f.suffix == ".safetensors":
        return read_safetensors(f, map_location)
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def check_shard_size(max_shard_size: int | str) -> int:
    """Return the largest size of a file in bytes; raises ConfigurationError if it is not a positive size."""
    try:
        size = 0 if isinstance(max_shard_size, bool) else convert_file_size_to_int(max_shard_size)
    except (ValueError, TypeError, OverflowError, AttributeError):
        size = 0
    if size <= 0:
        raise ConfigurationError(
            f"max_shard_size={max_shard_size!r} is not a size. Give a positive number of bytes, or text such as '5GB' "
            "(10**9 bytes) or '5GiB' (2**30 bytes)."
        )
    return size


def save_model_weights(
    state_dict: dict[str, Any],
    folder: Path,
    max_shard_size: int | str,
    safe_serialization: bool,
    read: Callable[[list[str]], dict[str, Any]] | None = None,
) -> list[str]:
    """Write a model's weights, sharded if they are large, and remove those of an earlier save."""
    from huggingface_hub import split_torch_state_dict_into_shards

    size = check_shard_size(max_shard_size)
    stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe_serialization else (MODEL_NAME, "bin")
    tensors = clean_state_dict_for_safetensors(state_dict) if safe_serialization else state_dict
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern=f"{stem}{{suffix}}.{suffix}", max_shard_size=size
    )
    written = list(plan.filename_to_tensors)
    for filename, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names} if read is None else read(names)
        write_atomically(folder / filename, _writer(shard, safe_serialization))
        del shard  # before the next one is read
    index_name = f"{stem}.{suffix}.index.json"
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        # The index is written last: a reader that finds it finds all the files it names.
        write_atomically(folder / index_name, lambda path: Path(path).write_text(text, encoding="utf-8"))
        written.append(index_name)
    # A loader would mix files of an earlier save, with another number of shards, with these.
    for path in [*folder.glob(f"{stem}-*-of-*.{suffix}"), folder / f"{stem}.{suffix}", folder / index_name]:
        if path.name not in written:
            path.unlink(missing_ok=True)
    return written


def is_weights_file(name: str) -> bool:
    """Return True if :func:`save_model_weights` gives files this name."""
    return _WEIGHTS_FILE.fullmatch(name) is not None
