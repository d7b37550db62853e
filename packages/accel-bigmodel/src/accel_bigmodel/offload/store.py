"""Weights that lie in a folder, or in the checkpoint that they came from, and are read when they are needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_state.errors import ConfigurationError

from ..checkpoint.safetensors_file import SafetensorsFile
from ..tensors import as_dtype

OFFLOAD_INDEX_NAME = "index.json"

# numpy has no such types: their bytes are kept as integers of the same width.
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write a weight to ``<offload_folder>/<weight_name>.dat``, as bare values.

    Args:
        weight: the tensor.
        weight_name: its name in the model.
        offload_folder: an existing folder.
        index: gets an entry with the type and shape, which reading needs.

    Returns:
        The index.
    """
    values = weight.detach().cpu().contiguous()
    entry = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(values.shape)}
    array = values.view(_AS_INTEGERS[values.dtype]).numpy() if values.dtype in _AS_INTEGERS else values.numpy()
    array.tofile(Path(offload_folder) / f"{weight_name}.dat")
    index = {} if index is None else index
    index[weight_name] = entry
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """A weight that :func:`offload_weight` wrote, mapped rather than read; writing into it does not change the file.

    Args:
        weight_file: the file with the values.
        weight_info: its entry in the index.

    Raises:
        ConfigurationError: the file is not as long as the entry says.
    """
    dtype, shape = as_dtype(weight_info["dtype"]), tuple(weight_info["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    expected, found = count * dtype.itemsize, os.path.getsize(weight_file)
    if expected != found:
        raise ConfigurationError(
            f"{weight_file} has {found} bytes, and its index says {expected}: offload the weights again"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    mapped = np.memmap(weight_file, dtype=np.uint8, mode="c", shape=(expected,))
    return torch.from_numpy(np.asarray(mapped)).view(dtype).view(shape)


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write or extend the ``index.json`` of a folder of offloaded weights; nothing is written for an empty index."""
    if not index:
        return
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict to a folder, which is made, with their index."""
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of a mapping whose names begin with a prefix, under the names without it.

    Args:
        dataset: any mapping of names to tensors.
        prefix: what names begin with ("encoder.").
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in memory and on the disk, as one mapping that reads when it is asked.

    Args:
        state_dict: weights in memory.
        save_folder: a folder that :func:`offload_state_dict` or :func:`offload_weight` wrote to.
        index: what lies on the disk: name -> ``{"dtype": ..., "shape": ...}`` for a file of the folder, or
            ``{"safetensors_file": path, "weight_name": name in it, "dtype": type to convert to}``. None: the folder's
            ``index.json``.
        device: where weights on the disk are put. None: the CPU.

    Raises:
        ConfigurationError: neither weights nor a place where they could be.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError("there are no weights to load: give state_dict=, save_folder= or index=")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = None if save_folder is None else Path(save_folder)
        self.index = dict(self._index_of_folder() if index is None else index)
        self.device = device
        # In memory goes before on the disk.
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._files: dict[str, SafetensorsFile] = {}

    def _index_of_folder(self) -> dict[str, Any]:
        if self.save_folder is None:
            return {}
        path = self.save_folder / OFFLOAD_INDEX_NAME
        if not path.is_file():
            raise ConfigurationError(
                f"{self.save_folder} holds no {OFFLOAD_INDEX_NAME}: it is not a folder of offloaded weights"
            )
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.read(key)

    def read(self, key: str, pool: Any = None) -> torch.Tensor:
        """A weight; what is read from the disk may lie in a buffer of ``pool``.

        Raises:
            KeyError: no such weight.
        """
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is None:
            if self.save_folder is None:
                raise ConfigurationError(f"{key} lies in a folder of offloaded weights: give save_folder=")
            value = load_offloaded_weight(self.save_folder / f"{info.get('file', key)}.dat", info)
        else:
            value = self.file(info["safetensors_file"]).read(info.get("weight_name", key), pool)
            if "dtype" in info:
                value = value.to(as_dtype(info["dtype"]))
        return value if self.device is None else value.to(self.device)

    def read_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several weights, to stay: those that lie together in a safetensors file are mapped together."""
        wanted = list(dict.fromkeys(keys))
        of_file: dict[str, list[str]] = {}
        for key in wanted:
            info = self.index.get(key, {})
            if key not in self.state_dict and info.get("safetensors_file") is not None:
                of_file.setdefault(info["safetensors_file"], []).append(key)
        found: dict[str, torch.Tensor] = {}
        for path, inside in of_file.items():
            names = {key: self.index[key].get("weight_name", key) for key in inside}
            tensors = self.file(path).tensors(set(names.values()))
            for key in inside:
                info = self.index[key]
                found[key] = tensors[names[key]].to(as_dtype(info["dtype"])) if "dtype" in info else tensors[names[key]]
        return {key: found[key] if key in found else self.read(key) for key in wanted}

    def ask_for(self, key: str) -> None:
        """Have the system begin to read a weight from the disk, where it lies there."""
        info = self.index.get(key, {})
        if key not in self.state_dict and info.get("safetensors_file") is not None:
            self.file(info["safetensors_file"]).ask_for([info.get("weight_name", key)])

    def file(self, path: str | os.PathLike[str]) -> SafetensorsFile:
        """The opened file of a path."""
        path = str(path)
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
        return self._files[path]

    def adopt(self, files: Mapping[str, SafetensorsFile]) -> None:
        """Use files that have been opened already."""
        self._files.update(files)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """The part of a state dict that belongs to some submodules, by their full names."""
    wanted = tuple(submodule_names)
    dotted = tuple(f"{name}." for name in wanted)
    return {name: value for name, value in state_dict.items() if name in wanted or name.startswith(dotted)}
