"""Engines in a checkpoint: DeepSpeed's own files, gathered before they are written, and read without running code.

The first model is in ``pytorch_model/``, further ones in ``pytorch_model_1/`` and so on, as DeepSpeed lays them out;
``latest`` names the first folder, and ``zero_to_fp32.py`` makes whole weights of it: ``python zero_to_fp32.py .
weights``. Models without an optimizer whose parameters are divided have one file of each rank,
``frozen_rank<rank>.pt``.
"""

from __future__ import annotations

import importlib
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

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..checkpoint.names import MODEL_FOLDER, CheckpointError, engine_folders
from ..checkpoint.safe_load import read, require_count
from ..core.types import Gathered, Part
from . import universal
from .runtime import is_engine

LATEST, RECOVERY = "latest", "zero_to_fp32.py"
# What DeepSpeed's files hold besides tensors and plain values: settings, and how the loss is scaled. Nothing of it runs
# when it is read.
_OF_DEEPSPEED = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.reshape_utils", "SubparamShape"),
)


def tag_of(index: int) -> str:
    """The folder of the model with this index."""
    return MODEL_FOLDER if index == 0 else f"{MODEL_FOLDER}_{index}"


def is_frozen(engine: Any) -> bool:
    """Whether an engine divides parameters, and has no optimizer."""
    return bool(engine.zero_optimization_partition_weights()) and engine.basic_optimizer is None


@dataclass
class _Writer:
    """In place of an engine's own writer: keeps what it is given."""

    original: Any
    parts: list[Part] = field(default_factory=list)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the contents of a file."""
        place = Path(path)
        self.parts.append(Part(f"{place.parent.name}/{place.name}", state_dict, each_rank=True))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: folders are made when files are written."""

    def create(self, info: Any) -> None:
        """Nothing."""

    def commit(self, info: Any) -> bool:
        """Nothing: a checkpoint is whole when its manifest is."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


@dataclass
class _Reader:
    """In place of an engine's own reader: takes tensors, plain values and DeepSpeed's settings only."""

    original: Any
    load_kwargs: dict[str, Any] | None

    def load(self, path: str, map_location: Any = None, *_: Any, **__: Any) -> Any:
        """The contents of a file."""
        return read_file(
            Path(path), "cpu" if map_location is None or callable(map_location) else map_location, self.load_kwargs
        )

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


def read_file(path: Path, map_location: Any = "cpu", load_kwargs: dict[str, Any] | None = None) -> Any:
    """Read a file of an engine without running code.

    Raises:
        CheckpointError: it is damaged, or holds anything else.
    """
    with torch.serialization.safe_globals(_settings_of_deepspeed()):
        return read(path, map_location, load_kwargs)


def _settings_of_deepspeed() -> list[Any]:
    found = (getattr(importlib.import_module(module), name, None) for module, name in _OF_DEEPSPEED if _exists(module))
    return [kind for kind in found if kind is not None]


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextmanager
def _files_through(engine: Any, replacement: Any) -> Iterator[None]:
    original, engine.checkpoint_engine = engine.checkpoint_engine, replacement
    try:
        yield
    finally:
        engine.checkpoint_engine = original


def gather_engines(models: Sequence[nn.Module], gathered: Gathered) -> None:
    """Get all models ready to be written. Every rank must call it.

    Raises:
        ConfigurationError: optimizer states are on NVMe drives.
    """
    for index, model in enumerate(models):
        tag = tag_of(index)
        if not is_engine(model):
            gathered.parts.append(Part(f"{tag}/whole_model_states.pt", {"module": model.state_dict()}))
        elif is_frozen(model):
            own = {name: _shard(parameter) for name, parameter in model.module.named_parameters()}  # type: ignore[union-attr]
            buffers = dict(model.module.named_buffers())  # type: ignore[union-attr]
            content = {"world_size": PartialState().num_processes, "shards": own, "buffers": buffers}
            gathered.parts.append(Part(f"{tag}/{_frozen_name(PartialState().process_index)}", content, each_rank=True))
        else:
            gathered.parts.extend(_parts_of(model, tag))
    if any(is_engine(model) and not is_frozen(model) and model.zero_optimization() for model in models):  # type: ignore[operator]
        gathered.finalizers.append(partial(_add_recovery, tag=tag_of(0)))


def _parts_of(engine: Any, tag: str) -> list[Part]:
    if engine.zero_nvme_offload_optimizer():
        raise ConfigurationError(
            "save_state does not take optimizer states from NVMe drives. Offload them to cpu, or save with "
            "engine.save_checkpoint(folder), "
            "which copies the drive's files."
        )
    writer = _Writer(engine.checkpoint_engine)
    with tempfile.TemporaryDirectory(prefix="accel-deepspeed-") as scratch, _files_through(engine, writer):
        engine.save_checkpoint(scratch, tag=tag, client_state=universal.mark(engine), save_latest=False)
    return writer.parts


def _shard(parameter: Any) -> torch.Tensor:
    """A rank's part of a divided parameter."""
    return (parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter).detach()


def _frozen_name(rank: int) -> str:
    return f"frozen_rank{rank}.pt"


def _add_recovery(folder: Path, tag: str) -> None:
    """Beside the engines, what makes whole weights of them, as DeepSpeed leaves it there."""
    script = importlib.import_module("deepspeed.utils.zero_to_fp32").__file__
    shutil.copyfile(str(script), folder / RECOVERY)
    (folder / LATEST).write_text(tag, encoding="utf-8")


@dataclass(frozen=True)
class Source:
    """A checkpoint to load engines from.

    Attributes:
        folder: where it is.
        names: its files.
        world_size: the number of processes that saved it; None if it does not say.
        load_kwargs: further arguments of ``torch.load``.
        strict: refuse weights that are missing or unknown.
    """

    folder: Path
    names: Sequence[str]
    world_size: int | None
    load_kwargs: dict[str, Any] | None = None
    strict: bool = True

    def plan(self, models: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> list[Callable[[], Any]]:
        """What puts the states in place; every rank must call that, in this order.

        Args:
            models: all prepared models.
            wanted: those of them to load.

        Raises:
            CheckpointError: there is another number of models, or they were saved without DeepSpeed.
        """
        tags = engine_folders(self.names)
        if not tags:
            raise CheckpointError(
                f"{self.folder} was saved without DeepSpeed, whose engines load only what engines have saved. Load "
                "the weights into the "
                "model before prepare(): accel.utils.load_checkpoint_in_model(model, folder)."
            )
        require_count("models", len(tags), len(models), self.folder)
        chosen = [(tag, model) for tag, model in zip(tags, models, strict=True) if any(model is one for one in wanted)]
        return [partial(self._load, tag, model) for tag, model in chosen]

    def _load(self, tag: str, model: nn.Module) -> None:
        if not is_engine(model):
            model.load_state_dict(
                read_file(self.folder / tag / "whole_model_states.pt", "cpu", self.load_kwargs)["module"]
            )
        elif is_frozen(model):
            self._load_frozen(tag, model)
        elif self.world_size in (None, PartialState().num_processes):
            self._load_engine(model, self.folder, tag)
        else:
            read_safely = partial(read_file, load_kwargs=self.load_kwargs)
            with universal.converted(self.folder, tag, model, self.world_size, read_safely) as folder:
                self._load_engine(model, folder, tag)
            if model.zero_optimization():  # type: ignore[operator]
                universal.complete(model, self.folder / tag, read_safely)

    def _load_engine(self, engine: Any, folder: Path, tag: str) -> None:
        with _files_through(engine, _Reader(engine.checkpoint_engine, self.load_kwargs)):
            try:
                path, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=self.strict)
            except CheckpointError:
                raise
            except (RuntimeError, KeyError, AssertionError, ValueError) as error:
                raise CheckpointError(
                    f"{self.folder / tag} does not fit the engine that it is loaded into: {error}"
                ) from error
        if path is None:
            raise CheckpointError(f"{self.folder / tag} has no file for this rank. Choose another checkpoint.")

    def _load_frozen(self, tag: str, engine: Any) -> None:
        state = PartialState()
        path = self.folder / tag / _frozen_name(state.process_index)
        content = read_file(path, "cpu", self.load_kwargs) if path.is_file() else {}
        if content.get("world_size") != state.num_processes:
            raise CheckpointError(
                f"{self.folder / tag} has a model without an optimizer, divided among "
                f"{content.get('world_size', self.world_size)} "
                f"processes; here are {state.num_processes}. Start as many, or prepare that model with another "
                "Accelerator, from its own "
                "weights, before the state is saved."
            )
        for name, parameter in engine.module.named_parameters():
            target = _shard(parameter)
            if name not in content["shards"] or content["shards"][name].shape != target.shape:
                raise CheckpointError(
                    f"{path} does not fit {type(engine.module).__name__}: {name} is missing or of another shape."
                )
            target.copy_(content["shards"][name])
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(content["buffers"][name])
