"""Weights in a directory or in their original checkpoint, read when they are needed."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.paths import as_path, leads_outside, open_for_writing, refuse_link

from ..checkpoint.mapped_pages import map_file, populate, read_sequentially
from ..checkpoint.safetensors_file import SafetensorsFile
from ..tensors import as_dtype

OFFLOAD_INDEX_NAME = "index.json"


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write a weight to ``<offload_folder>/<weight_name>.dat``, without a header.

    Args:
        weight_name: its name in the model.
        offload_folder: an existing directory.
        index: receives the dtype and shape, which reading requires.

    Returns:
        The index.

    Raises:
        ConfigurationError: the name leads outside of the directory, or the file is a symbolic link.
    """
    path = Path(offload_folder) / f"{weight_name}.dat"
    refuse_link(path)
    if leads_outside(offload_folder, f"{weight_name}.dat"):
        raise ConfigurationError(f"the weight {weight_name!r} cannot be stored: {path} is not in {offload_folder}.")
    values = weight.detach().cpu().contiguous()
    with open(open_for_writing(path), "wb") as file:
        values.reshape(-1).view(torch.uint8).numpy().tofile(file)
    index = {} if index is None else index
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(values.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map a weight that :func:`offload_weight` wrote; writing into the tensor does not change the file.

    Args:
        weight_file: the file with the values.
        weight_info: its entry in the index.

    Raises:
        ConfigurationError: the size of the file differs from the index.
    """
    return _map_weight(weight_file, weight_info)


def _map_weight(file: str | os.PathLike[str], info: Mapping[str, Any], read_now: bool = False) -> torch.Tensor:
    dtype, shape = as_dtype(info["dtype"]), tuple(info["shape"])
    expected, actual = math.prod(shape) * dtype.itemsize, os.path.getsize(file)
    if expected != actual:
        raise ConfigurationError(
            f"{file} has {actual} bytes, but its index says {expected}. Offload the weights again."
        )
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    with open(file, "rb") as opened:
        memory = map_file(opened.fileno(), 0, expected, file)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    if read_now:
        read_sequentially(memory)
        populate(data, file)
    return data.view(dtype).view(shape)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict) or not all(isinstance(info, dict) for info in index.values()):
            raise ValueError("no dictionary of weights")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not an index of offloaded weights ({error}). Give another directory, or delete it."
        ) from error
    return index


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write or extend the ``index.json`` of a directory of offloaded weights; an empty index writes nothing."""
    if not index:
        return
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    refuse_link(path)
    existing = _read_index(path) if path.is_file() else {}
    with open(open_for_writing(path), "w", encoding="utf-8") as file:
        file.write(json.dumps({**existing, **index}, indent=2))


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict and their index to a directory, which is created."""
    os.makedirs(as_path("offload_dir", save_dir), exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of a mapping whose names begin with a prefix, under the names without it.

    Args:
        dataset: a mapping of names to tensors.
        prefix: for example ``"encoder."``.
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
    """Weights in memory and on the disk as one mapping, read on access.

    Args:
        state_dict: weights in memory; they take precedence over those on the disk.
        save_folder: a directory written by :func:`offload_state_dict` or :func:`offload_weight`.
        index: weights on the disk: name -> ``{"dtype": ..., "shape": ...}`` for a file of the directory, or
            ``{"safetensors_file": path, "weight_name": name in it, "dtype": dtype to convert to}``. None: the
            directory's ``index.json``.
        device: where weights from the disk are put. None: the CPU.

    Raises:
        ConfigurationError: all of the first three are None, or the directory has no index.
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
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder: Path | None = None if save_folder is None else Path(save_folder)
        self.index: dict[str, Any] = dict(self._saved_index() if index is None else index)
        self.device = device
        self.all_keys: list[str] = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._files: dict[str, SafetensorsFile] = {}

    def _saved_index(self) -> dict[str, Any]:
        if self.save_folder is None:
            return {}
        path = self.save_folder / OFFLOAD_INDEX_NAME
        if not path.is_file():
            raise ConfigurationError(
                f"{self.save_folder} has no {OFFLOAD_INDEX_NAME}, so it is not a directory of offloaded weights"
            )
        return _read_index(path)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.read_many((key,))[key]

    def read_many(self, keys: Iterable[str], read_now: bool = False) -> dict[str, torch.Tensor]:
        """Several weights; those of one safetensors file are mapped together.

        Args:
            keys: their names.
            read_now: read the pages of mapped weights here, without holding the GIL, instead of when they are used.
        """
        values: dict[str, torch.Tensor] = {}
        in_file: dict[str, dict[str, str]] = {}
        for key in keys:
            if key in self.state_dict:
                values[key] = self.state_dict[key]
                continue
            info = self.index[key]
            if "stack" in info:  # the tensors of experts that are stored one by one
                values[key] = info["stack"].read().to(device=self.device, dtype=as_dtype(info["dtype"]))
            elif info.get("safetensors_file") is not None:
                in_file.setdefault(info["safetensors_file"], {})[key] = info.get("weight_name", key)
            elif self.save_folder is None:
                raise ConfigurationError(f"{key} is in a directory of offloaded weights: give save_folder=")
            else:
                value = _map_weight(self.save_folder / f"{info.get('file', key)}.dat", info, read_now)
                values[key] = value if self.device is None else value.to(self.device)
        for path, names in in_file.items():
            tensors = self.open_file(path).tensors(set(names.values()), read_now)
            for key, name in names.items():
                dtype = as_dtype(self.index[key]["dtype"]) if "dtype" in self.index[key] else None
                values[key] = tensors[name].to(device=self.device, dtype=dtype)
        return values

    def is_mapped(self, key: str) -> bool:
        """Return True if a weight is used where it is in a mapped file, without a copy."""
        if key in self.state_dict or self.device is not None:
            return False
        info = self.index[key]
        if "stack" in info:
            return False
        if info.get("safetensors_file") is None or "dtype" not in info:
            return True
        return self.open_file(info["safetensors_file"]).dtype(info.get("weight_name", key)) == as_dtype(info["dtype"])

    def open_file(self, path: str) -> SafetensorsFile:
        """Return a safetensors file of the index, which stays open."""
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
        return self._files[path]

    def add_open_files(self, files: Mapping[str, SafetensorsFile]) -> None:
        """Use files that are open already."""
        self._files.update(files)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class _Overlaid(dict[str, torch.Tensor]):
    """A copy of a dictionary with other values for some names. What is assigned to it, the dictionary gets too."""

    def __init__(self, weights: dict[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__({**weights, **values})
        self._weights = weights

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._weights[name] = value
        super().__setitem__(name, value)


def with_values(weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return offloaded weights with other values for some names; an unknown kind of mapping as it is."""
    if isinstance(weights, PrefixedDataset):
        named = {f"{weights.prefix}{name}": value for name, value in values.items()}
        return PrefixedDataset(with_values(weights.dataset, named), weights.prefix)
    if isinstance(weights, dict):
        return _Overlaid(weights, values)
    if isinstance(weights, OffloadedWeightsLoader) and isinstance(weights.state_dict, dict):
        overlaid = copy.copy(weights)
        overlaid.state_dict = _Overlaid(weights.state_dict, values)
        return overlaid
    return weights


Origin = tuple[Any, int]
"""What values were read from: the object that holds them or describes where they are, and its version."""


def origins(source: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[Origin]:
    """Return the origins of some values of a mapping, which tell later whether they have been replaced or written to.

    Values that a mapping of another class than ``dict`` makes when it is asked have none: they count as unchanged.
    """
    held = dictionary_of(source) or {}
    index = source.index if isinstance(source, OffloadedWeightsLoader) else {}
    found: list[Origin] = []
    for name in names:
        value: Any = held.get(name, index.get(name))
        has_version = isinstance(value, torch.Tensor) and not value.is_inference()
        found.append((value, value._version if has_version else 0))
    return found


def dictionary_of(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the dictionary with those weights of a mapping that are in host memory; None if it has no dictionary."""
    held = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    return held if isinstance(held, dict) else None


def are_same(first: Sequence[Origin], second: Sequence[Origin]) -> bool:
    """Return True if two lists of origins name the same objects in the same versions."""
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(a is b and version == other for (a, version), (b, other) in pairs)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Return the part of a state dict that belongs to some submodules, by their full names."""
    names = tuple(submodule_names)
    prefixes = tuple(f"{name}." for name in names)
    return {name: value for name, value in state_dict.items() if name in names or name.startswith(prefixes)}
