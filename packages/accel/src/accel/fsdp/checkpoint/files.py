"""Files of sharded models and optimizers in a checkpoint.

==================  =============================================  ===========================================
state_dict_type     a model                                        its optimizer
==================  =============================================  ===========================================
FULL_STATE_DICT     ``pytorch_model_fsdp.bin``                     ``optimizer.bin``, by parameter name
SHARDED_STATE_DICT  ``pytorch_model_fsdp_0/``, written by          ``optimizer_0/``, in the same format
                    torch.distributed.checkpoint
LOCAL_STATE_DICT    ``pytorch_model_fsdp_rank0.bin`` per rank      ``optimizer_rank0.bin`` per rank
==================  =============================================  ===========================================

With ``sharded_state_format="safetensors"`` the directory of a model has whole tensors in files of the safetensors
format instead, and an index of them.

Further models have their index: ``pytorch_model_fsdp_1.bin``, ``pytorch_model_fsdp_1/``,
``pytorch_model_fsdp_1_rank0.bin``. A moving average has files like those of a model, named ``moving_average``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_checkpoint.names import AVERAGE_NAME, OPTIMIZER_NAME, SHARD_TABLE_NAME, CheckpointError, numbered
from accel_checkpoint.names import FSDP_MODEL_NAME as MODEL_STEM
from accel_checkpoint.parts import Part
from accel_checkpoint.sharded.whole_tensors import whole_state
from accel_checkpoint.sharded.writer import shard_state
from accel_checkpoint.validation import Change, check_named_structure, check_optimizer, loading
from accel_state.collectives.single import Collectives

from ...core.local_part import local
from ...core.types import Gathered, Layout
from ...core.weights_io import MODEL_NAME, SAFE_MODEL_NAME
from . import state_dicts
from .state_dicts import State

_OF_MODELS: Final = ((MODEL_STEM, "bin"), (SAFE_MODEL_NAME, "safetensors"), (MODEL_NAME, "bin"))
OF_AVERAGES: Final = ((AVERAGE_NAME, "safetensors"), (AVERAGE_NAME, "bin"))


def gather_one(
    kind: StateDictType,
    stem: str,
    index: int,
    state: State,
    collectives: Collectives,
    use_dcp: bool = True,
    into: Gathered | None = None,
    shard_format: str = "dcp",
) -> Gathered:
    """Prepare one model, or one optimizer, for writing. Every rank must call it.

    ``shard_format`` is the format of a model's shards; those of an optimizer are always "dcp".
    """
    gathered = Gathered() if into is None else into
    what, rank = f"{stem} {index}", collectives.rank
    if kind is StateDictType.FULL_STATE_DICT:
        if stem == OPTIMIZER_NAME:
            state = state_dicts.full_optimizer_state(state, on_disk if rank == 0 else None)
        gathered.parts.append(Part(numbered(stem, index, "bin"), state, what))
    elif kind is StateDictType.SHARDED_STATE_DICT and use_dcp:
        root = "optimizer" if stem == OPTIMIZER_NAME else "model"
        shard = whole_state if shard_format == "safetensors" and root == "model" else shard_state
        parts, finalizer = shard({root: state}, f"{stem}_{index}", collectives)
        gathered.parts.extend(parts)
        gathered.finalizers.append(finalizer)
    else:
        name = (_local_name if kind is StateDictType.LOCAL_STATE_DICT else _rank_name)(stem, index, rank)
        content = {"world_size": collectives.world_size, "state": _local_parts(state)}
        gathered.parts.append(Part(name, content, what, each_rank=True))
    return gathered


def on_disk(full: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into a nameless temporary file, which the system writes out when memory is short."""
    if full.numel():
        with tempfile.TemporaryFile() as file:
            file.truncate(full.nbytes)
            path = f"/proc/self/fd/{file.fileno()}"
            if Path(path).exists():
                mapped = torch.from_file(path, shared=True, size=full.numel(), dtype=full.dtype)
                return mapped.view(full.shape).copy_(full)
    return full.cpu()


def _local_parts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _local_parts(item) for key, item in value.items()}
    return value.to_local().clone() if isinstance(value, DTensor) else value


def _local_name(stem: str, index: int, rank: int) -> str:
    """Return a rank's file of LOCAL_STATE_DICT."""
    return numbered(stem, index, "x").removesuffix(".x") + f"_rank{rank}.bin"


def _rank_name(stem: str, index: int, rank: int) -> str:
    """Return a rank's file of SHARDED_STATE_DICT without torch.distributed.checkpoint, which always has the index."""
    return f"{stem}_{index}_rank{rank}.bin"


@dataclass
class ShardedReader:
    """Reads models and optimizers of any format into any layout."""

    directory: Path  # the checkpoint
    names: Collection[str]  # its files
    rank: int  # of this process
    world_size: int  # number of processes
    read: Callable[[str], Any]  # reads a file of the checkpoint that torch has saved
    read_safetensors: Callable[[str], State]  # reads one in the safetensors format
    # what reads the files of a directory of torch.distributed.checkpoint; None maps them
    source: Callable[[Path], Any] = lambda directory: None
    used: set[str] = field(default_factory=set)  # the files that were read
    # read the files of single ranks even if there is a directory of torch.distributed.checkpoint
    prefers_ranks: bool = False

    def count(self, *stems: str) -> int:
        """Return how many objects there are files of, by the stems of their names."""
        suffix = rf"(?:_(\d+))?(?:_rank\d+)?(?:\.bin|\.safetensors|/{re.escape(SHARD_TABLE_NAME)})"
        matches = [re.fullmatch(f"(?:{'|'.join(stems)}){suffix}", name) for name in self.names]
        return len({int(match[1] or 0) for match in matches if match})

    def model(self, index: int, layout: Layout, files: Sequence[tuple[str, str]] = _OF_MODELS) -> State:
        """Read the weights of a model, from shards or from the first of the ``files``: (stem, suffix)."""
        own = files[0][0]
        if self._has_shards(own, index):
            directory = self._shards(own, index)
            return state_dicts.read_model(directory, layout, self.source(directory))
        local_state = self._rank_state(own, index)
        if local_state is not None:
            parts = {name: _as_part(layout, name, value) for name, value in local_state.items()}
            for name, part in parts.items():
                like = layout.tensors.get(name)
                if isinstance(part, torch.Tensor) and like is not None and part.shape != like.shape:
                    raise CheckpointError(
                        f"{self.directory} was saved with LOCAL_STATE_DICT, and its part of {name} has shape "
                        f"{tuple(part.shape)}, which does not match how this strategy shards it. Load it with FSDP on "
                        "the same ranks, or save with SHARDED_STATE_DICT."
                    )
            return parts
        for stem, suffix in files:
            name = numbered(stem, index, suffix)
            if name in self.names:
                self.used.add(name)
                weights = self.read_safetensors(name) if suffix == "safetensors" else self.read(name)
                if not isinstance(weights, dict):
                    raise CheckpointError(f"{self.directory / name} does not hold weights. Choose another one.")
                return state_dicts.model_from_full(weights, layout, self.directory / name)
        raise CheckpointError(f"{self.directory} has no weights of model {index}. Choose another checkpoint.")

    def optimizer(self, index: int, layout: Layout, names: Sequence[str]) -> State:
        if self._has_shards(OPTIMIZER_NAME, index):
            directory = self._shards(OPTIMIZER_NAME, index)
            return state_dicts.read_optimizer(directory, layout, self.source(directory))
        local_state = self._rank_state(OPTIMIZER_NAME, index)
        if local_state is not None:
            check_named_structure(local_state, self.directory)
            parts = {}
            for name, entries in local_state["state"].items():
                parts[name] = {key: _as_part(layout, name, value) for key, value in entries.items()}
            return {"state": parts, "param_groups": local_state["param_groups"]}
        name = numbered(OPTIMIZER_NAME, index, "bin")
        if name not in self.names:
            raise CheckpointError(f"{self.directory} has no state of optimizer {index}. Choose another checkpoint.")
        self.used.add(name)
        return state_dicts.optimizer_from_full(self.read(name), layout, names, self.directory / name)

    def _has_shards(self, stem: str, index: int) -> bool:
        if self.prefers_ranks and self._rank_namer(stem, index) is not None:
            return False
        return f"{stem}_{index}/{SHARD_TABLE_NAME}" in self.names

    def _shards(self, stem: str, index: int) -> Path:
        prefix = f"{stem}_{index}/"
        self.used.update(name for name in self.names if name.startswith(prefix))
        return self.directory / prefix

    def _rank_namer(self, stem: str, index: int) -> Callable[[str, int, int], str] | None:
        """Return the function that names the files of single ranks, if there are any."""
        return next((namer for namer in (_local_name, _rank_name) if namer(stem, index, 0) in self.names), None)

    def _rank_state(self, stem: str, index: int) -> Any:
        """Return this rank's own parts, as they were saved; None if the state was saved in another format."""
        namer = self._rank_namer(stem, index)
        if namer is None:
            return None
        name = namer(stem, index, self.rank)
        content = self.read(name) if name in self.names else {}
        saved = content.get("world_size", "other") if isinstance(content, dict) else "other"
        if saved != self.world_size:
            raise CheckpointError(
                f"{self.directory} was saved with LOCAL_STATE_DICT on {saved} processes and can only be loaded on as "
                f"many, but there are {self.world_size}. Save with SHARDED_STATE_DICT to load on any number."
            )
        pattern = re.compile(rf"{re.escape(name.rsplit('_rank', 1)[0])}_rank\d+\.bin")
        self.used.update(other for other in self.names if pattern.fullmatch(other))
        state = content.get("state")
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.directory / name} does not hold the state of a rank. Choose another one.")
        return state


def _as_part(layout: Layout, name: str, value: Any) -> Any:
    """Return a rank's local tensor as the DTensor that it is a part of."""
    like = layout.tensors.get(name)
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if not value.ndim or value.shape != local(like).shape:
        return value
    part = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    local(part).copy_(value)
    return part


def plan(
    reader: ShardedReader,
    layouts: Sequence[Layout],
    optimizers: Sequence[tuple[Layout, Optimizer, Sequence[str]]],
    strict: bool,
) -> tuple[list[Callable[[], Any]], list[Change]]:
    """Read models and optimizers; returns the calls that load models, and the loads of optimizers.

    Every rank must make them in this order.
    """
    models: list[Callable[[], Any]] = []
    for index, layout in enumerate(layouts):
        state = reader.model(index, layout)
        models.append(state_dicts.plan_model(layout, state, strict, reader.directory))
    changes = []
    for index, (layout, optimizer, names) in enumerate(optimizers):
        changes.append(plan_optimizer(reader, index, layout, optimizer, names))
    return models, changes


def plan_optimizer(
    reader: ShardedReader, index: int, layout: Layout, optimizer: Optimizer, names: Sequence[str]
) -> Change:
    """Read one optimizer; returns its load, which every rank must make."""
    state = reader.optimizer(index, layout, names)
    if layout.elsewhere or any(isinstance(tensor, DTensor) for tensor in layout.tensors.values()):
        return state_dicts.plan_optimizer(layout, optimizer, state, reader.directory)
    by_number = state_dicts.numbered(state, names, reader.directory)
    check_optimizer(optimizer, by_number, reader.directory)
    return loading(optimizer, by_number, reader.directory)
