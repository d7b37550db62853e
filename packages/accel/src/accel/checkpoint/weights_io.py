"""Writing weights and objects so that a reader never sees half a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..core.unwrap import id_tensor_storage

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"


def write_atomically(path: str | os.PathLike[str], write: Callable[[str], None]) -> None:
    """Write a file under a temporary name beside its own, and rename it when it is whole and on the disk.

    Args:
        path: the final name; an existing file is replaced.
        write: called with the temporary name.
    """
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private to their owner
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object once: on the main process, or on that of each node.

    Args:
        obj: anything torch can save; with ``safe_serialization`` a dictionary of tensors.
        f: a path, or an open binary file.
        save_on_each_node: write on every node, for file systems that the nodes do not share.
        safe_serialization: write the safetensors format.

    Raises:
        ConfigurationError: an object that safetensors cannot hold.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    writer = _safetensors_writer(obj) if safe_serialization else lambda target: torch.save(obj, target)
    if isinstance(f, (str, os.PathLike)):
        write_atomically(f, writer)
    elif safe_serialization:
        from safetensors.torch import save as to_bytes

        f.write(to_bytes(clean_state_dict_for_safetensors(obj)))
    else:
        torch.save(obj, f)


def _safetensors_writer(obj: Any) -> Callable[[str], None]:
    from safetensors.torch import save_file

    content = safetensors_content(obj)
    return lambda target: save_file(content, target, metadata={"format": "pt"})


def safetensors_content(obj: Any) -> dict[str, torch.Tensor]:
    """What of an object goes into a file in the safetensors format.

    Raises:
        ConfigurationError: it is more than a dictionary of tensors.
    """
    if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise ConfigurationError(
            f"safe_serialization=True holds dictionaries of tensors only, not {_contents(obj)}. Save it with "
            "safe_serialization=False."
        )
    return clean_state_dict_for_safetensors(dict(obj))


def _contents(obj: Any) -> str:
    if isinstance(obj, Mapping):
        return f"one with {sorted({type(v).__name__ for v in obj.values() if not isinstance(v, torch.Tensor)})}"
    return f"a {type(obj).__name__}"


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what :func:`save` wrote, without running code from the file.

    Args:
        f: a path or an open binary file; names ending in ``.safetensors`` are read as such.
        map_location: where to put tensors, as in ``torch.load``.
        **kwargs: for ``torch.load``; ``weights_only`` is on unless given.
    """
    if isinstance(f, (str, os.PathLike)) and str(f).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(f, device=str(map_location or "cpu"))
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict that safetensors can hold: contiguous tensors, and one name for tensors that share memory."""
    seen: dict[tuple[Any, ...], str] = {}
    cleaned: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        identity = (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and tensor.device.type != "meta" and seen.setdefault(identity, name) != name:
            continue
        cleaned[name] = tensor.detach().contiguous()
    return _separate_overlaps(cleaned)


def _separate_overlaps(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that lie in the same memory without being the same; the format knows no views."""
    owners: dict[tuple[torch.device, int, int], str] = {}
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        shared = tensor.numel() and owners.setdefault(id_tensor_storage(tensor), name) != name
        separate[name] = tensor.clone() if shared else tensor
    return separate


def save_model_weights(
    state_dict: dict[str, Any],
    folder: Path,
    max_shard_size: int | str,
    safe_serialization: bool,
    read: Callable[[list[str]], dict[str, Any]] | None = None,
) -> list[str]:
    """Write a model's weights, in shards where they are large, and remove those of an earlier save.

    Args:
        state_dict: names to tensors.
        folder: where to write.
        max_shard_size: largest file in bytes, or as text such as "5GB".
        safe_serialization: safetensors rather than torch's own format.
        read: gives the tensors of the names of one file, where ``state_dict`` has them on the meta device only.

    Returns:
        The names of the files of this save.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe_serialization else (MODEL_NAME, "bin")
    tensors = clean_state_dict_for_safetensors(state_dict) if safe_serialization else state_dict
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern=f"{stem}{{suffix}}.{suffix}", max_shard_size=max_shard_size
    )
    written = list(plan.filename_to_tensors)
    for filename, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names} if read is None else read(names)
        writer = _safetensors_writer(shard) if safe_serialization else _torch_writer(shard)
        write_atomically(folder / filename, writer)
    if plan.is_sharded:
        index_name = SAFE_WEIGHTS_INDEX_NAME if safe_serialization else WEIGHTS_INDEX_NAME
        text = (
            json.dumps({"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}, indent=2, sort_keys=True)
            + "\n"
        )
        # The index comes last: whoever finds it finds all it names.
        write_atomically(folder / index_name, lambda target: _write_text(target, text))
        written.append(index_name)
    _remove_stale(folder, stem, suffix, keep=set(written))
    return written


def _torch_writer(obj: Any) -> Callable[[str], None]:
    return lambda target: torch.save(obj, target)


def _write_text(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def _remove_stale(folder: Path, stem: str, suffix: str, keep: set[str]) -> None:
    """Remove files of an earlier save with another number of shards, which a loader would mix with these."""
    candidates = [
        *folder.glob(f"{stem}-*-of-*.{suffix}"),
        folder / f"{stem}.{suffix}",
        folder / f"{stem}.{suffix}.index.json",
    ]
    for path in candidates:
        if path.name not in keep:
            path.unlink(missing_ok=True)


def refuse_each_node(state: PartialState, each_node: bool) -> None:
    """Refuse to save on each of several nodes what is divided among all of their ranks.

    Raises:
        ConfigurationError: ``each_node`` is set, and there are several.
    """
    if each_node and state.environment.num_nodes > 1:
        raise ConfigurationError(
            f"save_on_each_node=True keeps everything on each node, and this model is divided among the ranks of "
            f"{state.environment.num_nodes} nodes. Save to a file system that all nodes share, without "
            "save_on_each_node."
        )


def refuse_unsavable(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuse to write a model of which a part has no values.

    Raises:
        ConfigurationError: naming tensors on the meta device.
    """
    empty = [
        name for name, value in state_dict.items() if isinstance(value, torch.Tensor) and value.device.type == "meta"
    ]
    if empty:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be saved: {len(empty)} tensors have no values (they are on the meta "
            "device), among them "
            f"{', '.join(empty[:3])}. Load its weights first."
        )
