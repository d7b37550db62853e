"""Reading a checkpoint: everything is read and looked at first, then put in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_data import SeedableRandomSampler, get_sampler
from accel_state import PartialState
from accel_state.errors import ConfigurationError

from . import rng_state
from .checkpoint_files import (
    LOADER_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    CheckpointError,
    custom_file,
    custom_files,
    numbered,
    numbered_files,
    read,
    require_count,
    require_files,
    rng_file,
)
from .manifest import Manifest
from .saving import MODEL_NAME, SAFE_MODEL_NAME
from .unwrapping import clean_name, extract_model_from_parallel, id_tensor_storage


class StateReader:
    """Reads one checkpoint for one rank.

    Args:
        folder: the checkpoint.
        rank: this process.
        map_location: where tensors are read to: None or "cpu", "on_device", or as in ``torch.load``.
        load_kwargs: further arguments of ``torch.load``.

    Raises:
        ConfigurationError: there is no such folder.
    """

    def __init__(self, folder: Path, rank: int, map_location: Any = None, load_kwargs: dict[str, Any] | None = None) -> None:
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder} is no folder, so there is no state to load from it. Give the path that save_state returned."
            )
        self.folder = folder
        self.rank = rank
        self.manifest = Manifest.read(folder)
        self._process = PartialState()
        self._map_location = self._process.device if map_location == "on_device" else map_location or "cpu"
        self._load_kwargs = load_kwargs
        self._own: dict[str, Any] = {}
        self._changes: list[Callable[[], Any]] = []

    @property
    def step(self) -> int:
        """Micro batches in the accumulation window that was open."""
        return int(self._own.get("step", 0))

    def verify(self) -> None:
        """Compare all files with the manifest, but those that belong to other ranks; without a manifest there is nothing to compare with.

        Raises:
            CheckpointError: files are missing or damaged.
        """
        if self.manifest is None:
            return
        if self._own_file() not in self.manifest.files:
            raise CheckpointError(
                f"{self.folder} has no {self._own_file()}: it was saved on {self.manifest.world_size} processes, and this is rank "
                f"{self.rank} of {self._process.num_processes}. Start as many processes as saved it."
            )
        self.manifest.verify(self.folder, lambda name: not name.startswith(f"{RNG_STATE_NAME}_") or name == self._own_file())

    def _own_file(self) -> str:
        return rng_file(self.rank)

    def read_all(
        self,
        models: list[Any],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        scaler: torch.amp.GradScaler | None,
        load_model_kwargs: dict[str, Any],
    ) -> None:
        """Read everything but registered objects; see :func:`accel.checkpointing.load_accelerator_state`."""
        require_files(self.folder, [self._own_file()])
        own = self._read(self._own_file())
        self._own = own if isinstance(own, dict) else {}
        self._read_models(models, load_model_kwargs)
        self._read_objects(OPTIMIZER_NAME, optimizers)
        self._read_objects(SCHEDULER_NAME, schedulers)
        self._read_loaders(dataloaders)
        if scaler is not None:
            require_files(self.folder, [SCALER_NAME])
            self._changes.append(partial(scaler.load_state_dict, self._read(SCALER_NAME)))

    def read_custom(self, objects: list[Any]) -> None:
        """Read the states of registered objects.

        Raises:
            CheckpointError: there is another number of them, or one cannot be read.
        """
        require_count("registered objects", len(custom_files(self.folder)), len(objects), self.folder)
        require_files(self.folder, [custom_file(index) for index in range(len(objects))])
        for index, obj in enumerate(objects):
            self._changes.append(partial(obj.load_state_dict, self._read(custom_file(index))))

    def apply(self) -> None:
        """Put everything that was read in place."""
        for change in self._changes:
            change()
        self._changes.clear()

    def restore_rng(self) -> None:
        """Put the random number generators back; last, because what came before may have drawn from them."""
        rng_state.restore(self._own, self._process.device_backend, self.folder / self._own_file())

    def _read(self, name: str) -> Any:
        # Generators take their states from host memory only.
        location = "cpu" if name.startswith((RNG_STATE_NAME, LOADER_NAME)) else self._map_location
        return read(self.folder / name, location, self._load_kwargs)

    def _read_models(self, models: list[Any], load_model_kwargs: dict[str, Any]) -> None:
        safe = numbered_files(self.folder, SAFE_MODEL_NAME, "safetensors")
        stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe else (MODEL_NAME, "bin")
        require_count("models", len(numbered_files(self.folder, stem, suffix)), len(models), self.folder)
        names = [numbered(stem, index, suffix) for index in range(len(models))]
        require_files(self.folder, names)
        for model, name in zip(models, names, strict=True):
            path = self.folder / name
            weights = _read_safetensors(path, self._map_location) if safe else read(path, self._map_location)
            self._changes.append(plan_weights(model, weights, path, **load_model_kwargs))

    def _read_objects(self, stem: str, objects: list[Any]) -> None:
        require_count(f"{stem}s", len(numbered_files(self.folder, stem, "bin")), len(objects), self.folder)
        names = [numbered(stem, index, "bin") for index in range(len(objects))]
        require_files(self.folder, names)
        for obj, name in zip(objects, names, strict=True):
            self._changes.append(partial(obj.load_state_dict, self._read(name)))

    def _read_loaders(self, dataloaders: list[Any]) -> None:
        with_position = {index: loader for index, loader in enumerate(dataloaders) if hasattr(loader, "load_state_dict")}
        if self.manifest is not None:
            saved = len(numbered_files(self.folder, LOADER_NAME, "bin"))
            require_count("dataloaders", saved, len(with_position), self.folder)
        for index, loader in enumerate(dataloaders):
            self._read_seed(index, get_sampler(loader))
        for index, loader in with_position.items():
            state = self._position(index)
            if state is not None:
                self._changes.append(partial(loader.load_state_dict, state))

    def _read_seed(self, index: int, sampler: Any) -> None:
        path = self.folder / numbered(SAMPLER_NAME, index, "bin")
        if isinstance(sampler, SeedableRandomSampler) and (self.manifest is not None or path.exists()):
            seed = self._read(path.name)
            if not isinstance(seed, dict) or not {"initial_seed", "epoch"} <= set(seed):
                raise CheckpointError(f"{path} does not hold a sampler's initial_seed and epoch.")
            self._changes.append(partial(_set_seed, sampler, **{name: seed[name] for name in ("initial_seed", "epoch")}))

    def _position(self, index: int) -> Any:
        """Where a loader stood: on this rank, if the world is of the same size; else what all ranks have in common."""
        own = self._own.get("dataloaders", {})
        same_world = self.manifest is not None and self.manifest.world_size == self._process.num_processes
        if same_world and index in own:
            return own[index]
        path = self.folder / numbered(LOADER_NAME, index, "bin")
        # Other libraries write positions only for some kinds of loader.
        return self._read(path.name) if self.manifest is not None or path.exists() else None


def _set_seed(sampler: SeedableRandomSampler, initial_seed: int, epoch: int) -> None:
    sampler.initial_seed = initial_seed
    sampler.set_epoch(epoch)


def _read_safetensors(path: Path, device: Any) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: dict[str, torch.Tensor] = load_file(path, device=str(device))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
    return weights


def plan_weights(model: nn.Module, weights: Any, path: Path, strict: bool = True, **kwargs: Any) -> Callable[[], Any]:
    """What puts weights into a model.

    Args:
        model: the model, prepared or not.
        weights: names, those of the unwrapped and uncompiled model, to tensors. Of names that share memory one is enough.
        path: for messages.
        strict: refuse names that are missing or unknown.
        **kwargs: for ``load_state_dict``.

    Raises:
        CheckpointError: the names are not those of the model.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    expected = inner.state_dict()
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path} holds a {type(weights).__name__} instead of the weights of a model.")
    if strict:
        cleaned = {clean_name(name) for name in expected}
        unknown = sorted(set(weights) - cleaned)
        missing = sorted(_missing(expected, weights))
        if unknown or missing:
            raise CheckpointError(
                f"{path} does not fit {type(inner).__name__}: it lacks {_some(missing)} and has {_some(unknown)} that the model lacks. "
                "Load it into the model that was saved, or pass strict=False to load what fits."
            )
    renamed = {name: weights[clean_name(name)] for name in expected if clean_name(name) in weights}
    return partial(inner.load_state_dict, renamed, strict=False, **kwargs)


def _missing(expected: dict[str, Any], weights: dict[str, Any]) -> list[str]:
    """Names without a value, unless they share memory with one that has it."""
    given = {_identity(value) for name, value in expected.items() if clean_name(name) in weights and isinstance(value, torch.Tensor)}
    absent = {name: value for name, value in expected.items() if clean_name(name) not in weights}
    return [name for name, value in absent.items() if not isinstance(value, torch.Tensor) or _identity(value) not in given]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.numel() or id(tensor))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more names" if len(names) > 5 else shown or "no names"
