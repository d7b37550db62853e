"""Engines in a checkpoint, in DeepSpeed's own file format.

The first model is in ``pytorch_model/``, further ones in ``pytorch_model_1/`` and so on. ``latest`` names the first
directory, and ``python zero_to_fp32.py . weights`` converts it to unsharded weights. A sharded model without an
optimizer has one file per rank, ``frozen_rank<rank>.pt``.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_checkpoint.names import MODEL_FOLDER, CheckpointError, engine_folders, require_files
from accel_checkpoint.parts import Part
from accel_checkpoint.safe_load import read
from accel_checkpoint.validation import Change, loading_weights
from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..core.types import Gathered
from ..core.unwrap import clean_name, extract_model_from_parallel
from . import structure, universal
from .runtime import is_engine

Load = Callable[[], Any]

LATEST, RECOVERY_SCRIPT = "latest", "zero_to_fp32.py"
_UNSHARDED_NAME = "whole_model_states.pt"
# The classes in DeepSpeed's files besides tensors and plain values. Unpickling them runs no code of their own.
_SAFE_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.reshape_utils", "SubparamShape"),
)


def _is_sharded_without_optimizer(engine: Any) -> bool:
    return bool(engine.zero_optimization_partition_weights()) and engine.basic_optimizer is None


@dataclass
class _CheckpointEngine:
    """Replaces an engine's own checkpoint engine: keeps what is saved in memory, and runs no code from files."""

    original: Any
    load_kwargs: dict[str, Any] | None = None
    parts: list[Part] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def save(self, state_dict: Any, path: str) -> None:
        file = Path(path)
        self.parts.append(Part(f"{file.parent.name}/{file.name}", state_dict, each_rank=True))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: directories are created when the parts are written."""

    def create(self, info: Any) -> None:
        """Do nothing."""

    def commit(self, info: Any) -> bool:
        """Do nothing: a checkpoint is complete when its manifest is written."""
        return True

    def load(self, path: str, map_location: Any = None, *_: Any, **__: Any) -> Any:
        location = "cpu" if map_location is None or callable(map_location) else map_location
        return read_engine_file(Path(path), location, self.load_kwargs)


def read_engine_file(
    path: Path, map_location: Any = "cpu", load_kwargs: dict[str, Any] | None = None, mapped: bool = False
) -> Any:
    """Read a file of an engine: tensors, plain values and DeepSpeed's settings. Runs no code from the file."""
    classes = []
    for module, name in _SAFE_CLASSES:
        if importlib.util.find_spec(module) is not None:
            classes.append(getattr(importlib.import_module(module), name, None))
    with torch.serialization.safe_globals([item for item in classes if item is not None]):
        return read(path, map_location, load_kwargs, mapped)


@contextmanager
def _replace_checkpoint_engine(engine: Any, load_kwargs: dict[str, Any] | None = None) -> Iterator[_CheckpointEngine]:
    original = engine.checkpoint_engine
    engine.checkpoint_engine = _CheckpointEngine(original, load_kwargs)
    try:
        yield engine.checkpoint_engine
    finally:
        engine.checkpoint_engine = original


def gather_engines(models: Sequence[nn.Module]) -> Gathered:
    """Return the files of all models. Every rank must call it."""
    state, gathered = PartialState(), Gathered()
    add_script = False
    for index, model in enumerate(models):
        tag = f"{MODEL_FOLDER}_{index}" if index else MODEL_FOLDER
        engine: Any = model
        if not is_engine(model):
            gathered.parts.append(Part(f"{tag}/{_UNSHARDED_NAME}", {"module": model.state_dict()}))
        elif _is_sharded_without_optimizer(engine):
            shards = {name: _shard(parameter) for name, parameter in engine.module.named_parameters()}
            buffers = dict(engine.module.named_buffers())
            content = {"world_size": state.num_processes, "shards": shards, "buffers": buffers}
            gathered.parts.append(Part(f"{tag}/{_frozen_name(state.process_index)}", content, each_rank=True))
        else:
            gathered.parts.extend(_capture_parts(engine, tag))
            add_script |= bool(engine.zero_optimization())
    if add_script:
        gathered.finalizers.append(_add_recovery_script)
    return gathered


def _capture_parts(engine: Any, tag: str) -> list[Part]:
    if engine.zero_nvme_offload_optimizer():
        raise ConfigurationError(
            "save_state cannot save optimizer states that are offloaded to NVMe. Offload them to cpu, or save with "
            "engine.save_checkpoint(directory), which copies the files from the drive."
        )
    with tempfile.TemporaryDirectory(prefix="accel-deepspeed-") as scratch, _replace_checkpoint_engine(engine) as own:
        engine.save_checkpoint(scratch, tag=tag, client_state=universal.universal_info(engine), save_latest=False)
    return own.parts


def _shard(parameter: Any) -> torch.Tensor:
    return (parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter).detach()


def _frozen_name(rank: int) -> str:
    return f"frozen_rank{rank}.pt"


def _add_recovery_script(directory: Path) -> None:
    script = importlib.import_module("deepspeed.utils.zero_to_fp32").__file__
    shutil.copyfile(str(script), directory / RECOVERY_SCRIPT)
    (directory / LATEST).write_text(MODEL_FOLDER, encoding="utf-8")


@dataclass(frozen=True)
class EngineLoader:
    """Loads engines from a checkpoint."""

    directory: Path  # the checkpoint
    names: Sequence[str]  # its files
    world_size: int | None  # number of processes that saved it; None if unknown
    load_kwargs: dict[str, Any] | None = None  # further arguments of ``torch.load``
    strict: bool = True  # refuse missing and unexpected weights

    def plan(self, models: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> tuple[list[Change], list[Load]]:
        """Check what each rank loads; returns the calls that load it, which every rank must make in this order.

        Returns:
            Conversions, which have to succeed before anything is loaded, and the loads.
        """
        tags = engine_folders(self.names)
        if not tags:
            raise CheckpointError(
                f"{self.directory} was saved without DeepSpeed, whose engines load only states saved by engines. Load "
                "the weights into the model before prepare(): accel.utils.load_checkpoint_in_model(model, directory)."
            )
        wanted_ids = set(map(id, wanted))
        loads: list[Load] = []
        resized: list[tuple[str, Any]] = []
        for tag, model in zip(tags, models, strict=False):
            if id(model) not in wanted_ids:
                continue
            engine: Any = model
            if not is_engine(model):
                path = self.directory / tag / _UNSHARDED_NAME
                inner, weights = extract_model_from_parallel(model, keep_torch_compile=False), self._content(path)
                loads.append(loading_weights(inner, weights.get("module"), path, clean=clean_name))
            elif _is_sharded_without_optimizer(engine):
                loads.append(self._plan_frozen(tag, engine))
            elif engine.zero_nvme_offload_optimizer():
                raise ConfigurationError(
                    "load_state cannot load optimizer states that are offloaded to NVMe, which save_state does not "
                    "save. Offload them to cpu, or use engine.load_checkpoint(directory)."
                )
            elif self.world_size in (None, PartialState().num_processes) or not engine.zero_optimization():
                structure.check_engine(engine, self.directory, tag, self._read_mapped, self.strict)
                loads.append(partial(self._load_engine, engine, self.directory, tag))
            else:
                resized.append((tag, engine))
        if not resized:
            return [], loads
        assert self.world_size is not None
        conversion = universal.Conversion(self.directory, resized, self.world_size, self._read, self._read_mapped)
        for tag, engine in resized:
            loads.append(partial(self._load_converted, conversion, tag, engine))
        loads.append(conversion.finish)
        return [Change(self.directory, conversion.convert, lambda: conversion.remove)], loads

    def _read(self, path: Path) -> Any:
        return read_engine_file(path, load_kwargs=self.load_kwargs)

    def _read_mapped(self, path: Path) -> Any:
        return read_engine_file(path, load_kwargs=self.load_kwargs, mapped=True)

    def _content(self, path: Path) -> dict[str, Any]:
        require_files(path.parent, [path.name])
        content = self._read_mapped(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a model's state.")
        return content

    def _load_engine(self, engine: Any, directory: Path, tag: str) -> None:
        with _replace_checkpoint_engine(engine, self.load_kwargs):
            try:
                path, _ = engine.load_checkpoint(str(directory), tag=tag, load_module_strict=self.strict)
            except CheckpointError:
                raise
            except (RuntimeError, KeyError, AssertionError, ValueError) as error:
                raise CheckpointError(f"{self.directory / tag} does not match the engine: {error}") from error
        if path is None:
            raise CheckpointError(f"{self.directory / tag} has no file for this rank. Choose another checkpoint.")

    def _load_converted(self, conversion: universal.Conversion, tag: str, engine: Any) -> None:
        with conversion.loading(engine) as directory:
            self._load_engine(engine, directory, tag)
        universal.restore_omitted_state(engine, self.directory / tag, self._read)

    def _plan_frozen(self, tag: str, engine: Any) -> Load:
        state = PartialState()
        path = self.directory / tag / _frozen_name(state.process_index)
        content = self._content(path) if path.is_file() else {}
        saved_by = content.get("world_size")
        if saved_by != state.num_processes:
            raise CheckpointError(
                f"{self.directory / tag} has a model without an optimizer, sharded over {saved_by or self.world_size} "
                f"processes, but this run has {state.num_processes}. Launch the same number, or prepare that model "
                "with another Accelerator from its own weights before the state is saved."
            )
        targets = {"shards": {name: _shard(item) for name, item in engine.module.named_parameters()}}
        targets["buffers"] = dict(engine.module.named_buffers())
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part, wanted in targets.items():
            saved = content.get(part)
            for name, target in wanted.items():
                value = saved.get(name) if isinstance(saved, dict) else None
                if not isinstance(value, torch.Tensor) or value.shape != target.shape:
                    raise CheckpointError(
                        f"{path} does not match {type(engine.module).__name__}: {name} is missing or has another shape."
                    )
                copies.append((target, value))
        return partial(_copy_all, copies)


def _copy_all(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, value in copies:
        target.copy_(value)
