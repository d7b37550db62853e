"""The files of sharded models and their optimizers within a checkpoint, written and read.

=================== ========================================================
===================================================== state-dict type     a model
          its optimizer =================== ========================================================
          =====================================================
FULL_STATE_DICT     ``pytorch_model_fsdp.bin``                               ``optimizer.bin``, by parameter name
SHARDED_STATE_DICT  ``pytorch_model_fsdp_0/``, of torch.distributed.checkpoint  ``optimizer_0/``, likewise
LOCAL_STATE_DICT    ``pytorch_model_fsdp_rank0.bin``, one for each rank      ``optimizer_rank0.bin``, likewise
=================== ========================================================
=====================================================

Those of further models have their index: ``pytorch_model_fsdp_1.bin``, ``pytorch_model_fsdp_1/``,
``pytorch_model_fsdp_1_rank0.bin``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_state.collectives.single import Collectives

from ...checkpoint.names import FSDP_MODEL_NAME as MODEL_STEM
from ...checkpoint.names import OPTIMIZER_NAME, CheckpointError, numbered
from ...checkpoint.names import SHARD_TABLE_NAME as METADATA_NAME
from ...checkpoint.safe_load import require_count
from ...checkpoint.weights_io import MODEL_NAME, SAFE_MODEL_NAME
from ...core.types import Gathered, Layout, Part
from ..grad_norm import local
from . import state_dicts
from .dcp_writer import shard_state
from .state_dicts import State


def gather(
    kind: StateDictType,
    weights: Sequence[State],
    optimizers: Sequence[tuple[nn.Module, Optimizer]],
    collectives: Collectives,
) -> Gathered:
    """Get models and optimizers ready to be written. Every rank must call it.

    Args:
        kind: the state-dict type.
        weights: of each model: each rank's part, or with FULL_STATE_DICT the whole on rank 0.
        optimizers: each with the model that it updates.
        collectives: of all ranks.
    """
    # Of optimizers, the sharded state is all that a rank holds at a time.
    named = [
        (OPTIMIZER_NAME, index, state_dicts.optimizer_state(model, optimizer))
        for index, (model, optimizer) in enumerate(optimizers)
    ]
    gathered = Gathered()
    for stem, index, state in [*((MODEL_STEM, index, state) for index, state in enumerate(weights)), *named]:
        _WRITERS[kind](gathered, stem, index, state, collectives)
    return gathered


def gather_one(
    kind: StateDictType, stem: str, index: int, state: State, collectives: Collectives, use_dcp: bool = True
) -> Gathered:
    """Get one model, or one optimizer, ready to be written. Every rank must call it.

    Args:
        kind: the state-dict type.
        stem: of the file's name: that of models or that of optimizers.
        index: its number.
        state: each rank's part; with FULL_STATE_DICT of a model the whole on rank 0.
        collectives: of all ranks.
        use_dcp: write SHARDED_STATE_DICT in the format of torch.distributed.checkpoint; without it, one file of torch's
            for each rank.
    """
    gathered = Gathered()
    if kind is StateDictType.SHARDED_STATE_DICT and not use_dcp:
        _gather_own(gathered, stem, index, state, collectives, _own_name(stem, index, collectives.rank))
    else:
        _WRITERS[kind](gathered, stem, index, state, collectives)
    return gathered


def _gather_shards(gathered: Gathered, stem: str, index: int, state: State, collectives: Collectives) -> None:
    root = "model" if stem == MODEL_STEM else "optimizer"
    shards = shard_state({root: state}, f"{stem}_{index}", collectives)
    gathered.parts.extend(shards.parts)
    gathered.finalizers.append(shards.close)


def _gather_whole(gathered: Gathered, stem: str, index: int, state: State, collectives: Collectives) -> None:
    if stem == OPTIMIZER_NAME:
        state = state_dicts.whole_optimizer_state(state, on_disk if collectives.rank == 0 else None)
    gathered.parts.append(Part(numbered(stem, index, "bin"), state, f"{stem} {index}"))


def on_disk(whole: torch.Tensor) -> torch.Tensor:
    """A tensor with its elements in a file without a name, which the system writes out when memory is short."""
    if not whole.numel():
        return whole.cpu()
    with tempfile.TemporaryFile() as file:
        file.truncate(whole.nbytes)
        path = f"/proc/self/fd/{file.fileno()}"
        if not Path(path).exists():
            return whole.cpu()
        mapped = torch.from_file(path, shared=True, size=whole.numel(), dtype=whole.dtype)
    return mapped.view(whole.shape).copy_(whole)


def _gather_local(gathered: Gathered, stem: str, index: int, state: State, collectives: Collectives) -> None:
    _gather_own(gathered, stem, index, state, collectives, _local_name(stem, index, collectives.rank))


def _gather_own(gathered: Gathered, stem: str, index: int, state: State, collectives: Collectives, name: str) -> None:
    content = {"world_size": collectives.world_size, "state": _parts_only(state)}
    gathered.parts.append(Part(name, content, f"{stem} {index}", each_rank=True))


_WRITERS = {
    StateDictType.FULL_STATE_DICT: _gather_whole,
    StateDictType.SHARDED_STATE_DICT: _gather_shards,
    StateDictType.LOCAL_STATE_DICT: _gather_local,
}


def _parts_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _parts_only(item) for key, item in value.items()}
    return value.to_local().clone() if isinstance(value, DTensor) else value


def _local_name(stem: str, index: int, rank: int) -> str:
    return numbered(stem, index, "x").removesuffix(".x") + f"_rank{rank}.bin"


def _own_name(stem: str, index: int, rank: int) -> str:
    """A rank's own file of SHARDED_STATE_DICT without torch.distributed.checkpoint: the first one has its number too."""
    return f"{stem}_{index}_rank{rank}.bin"


@dataclass
class ShardedReader:
    """Reads models and optimizers of any form into any layout.

    Attributes:
        folder: the checkpoint.
        names: its files.
        rank: this process.
        world_size: how many there are.
        read: reads a file of the checkpoint as torch has saved it.
        read_safetensors: reads one in the safetensors format.
        used: the files that were read.
        prefers_ranks: take the files of single ranks where there is a folder of torch.distributed.checkpoint too.
    """

    folder: Path
    names: Collection[str]
    rank: int
    world_size: int
    read: Callable[[str], Any]
    read_safetensors: Callable[[str], State]
    used: set[str] = field(default_factory=set)
    prefers_ranks: bool = False

    def count(self, stems: Sequence[str]) -> int:
        """How many models, or optimizers, the checkpoint holds."""
        found: set[int] = set()
        for name in self.names:
            for stem in stems:
                match = re.fullmatch(
                    rf"{stem}(?:_(\d+))?(?:_rank\d+)?(?:\.bin|\.safetensors|/{re.escape(METADATA_NAME)})", name
                )
                if match:
                    found.add(int(match[1] or 0))
        return len(found)

    def model(self, index: int, layout: Layout) -> State:
        """A model's state, each rank's part of it.

        Raises:
            CheckpointError: there is none, or it cannot be read, or does not fit.
        """
        if self._has_folder(MODEL_STEM, index):
            return state_dicts.read_model(self._folder(MODEL_STEM, index), layout)
        local = self._local(MODEL_STEM, index)
        if local is not None:
            return {name: self._own_part(layout, name, value) for name, value in local.items()}
        for stem, suffix in ((MODEL_STEM, "bin"), (SAFE_MODEL_NAME, "safetensors"), (MODEL_NAME, "bin")):
            name = numbered(stem, index, suffix)
            if name in self.names:
                self.used.add(name)
                whole = self.read_safetensors(name) if suffix == "safetensors" else self.read(name)
                return state_dicts.model_from_whole(whole, layout, self.folder / name)
        raise CheckpointError(f"{self.folder} has no weights of model {index}. Choose another checkpoint.")

    def optimizer(self, index: int, layout: Layout, names: Sequence[str]) -> State:
        """An optimizer's state by parameter name, each rank's part of it.

        Raises:
            CheckpointError: there is none, or it cannot be read, or does not fit.
        """
        if self._has_folder(OPTIMIZER_NAME, index):
            return state_dicts.read_optimizer(self._folder(OPTIMIZER_NAME, index), layout)
        local = self._local(OPTIMIZER_NAME, index)
        if local is not None:
            kept = {
                name: {key: _into(layout, name, value) for key, value in entry.items()}
                for name, entry in local["state"].items()
            }
            return {"state": kept, "param_groups": local["param_groups"]}
        name = numbered(OPTIMIZER_NAME, index, "bin")
        if name not in self.names:
            raise CheckpointError(f"{self.folder} has no state of optimizer {index}. Choose another checkpoint.")
        self.used.add(name)
        return state_dicts.optimizer_from_whole(self.read(name), layout, names, self.folder / name)

    def _own_part(self, layout: Layout, name: str, value: Any) -> Any:
        made = _into(layout, name, value)
        if isinstance(made, torch.Tensor) and name in layout.tensors and made.shape != layout.tensors[name].shape:
            raise CheckpointError(
                f"{self.folder} was saved with LOCAL_STATE_DICT, and its part of {name} has shape "
                f"{tuple(value.shape)}, which is not how "
                "this strategy divides it. Load it with FSDP on the same ranks, or save with SHARDED_STATE_DICT."
            )
        return made

    def _has_folder(self, stem: str, index: int) -> bool:
        if self.prefers_ranks and self._ranks_files(stem, index) is not None:
            return False
        return f"{stem}_{index}/{METADATA_NAME}" in self.names

    def _folder(self, stem: str, index: int) -> Path:
        prefix = f"{stem}_{index}/"
        self.used.update(name for name in self.names if name.startswith(prefix))
        return self.folder / prefix

    def _ranks_files(self, stem: str, index: int) -> Callable[[str, int, int], str] | None:
        """What the files of single ranks are called, if there are some."""
        return next((named for named in (_local_name, _own_name) if named(stem, index, 0) in self.names), None)

    def _local(self, stem: str, index: int) -> Any:
        """This rank's own part, as it was saved; None if the state was saved in another form."""
        named = self._ranks_files(stem, index)
        if named is None:
            return None
        name = named(stem, index, self.rank)
        content = self.read(name) if name in self.names else {}
        saved = content.get("world_size", "other")
        if saved != self.world_size:
            raise CheckpointError(
                f"{self.folder} was saved with LOCAL_STATE_DICT on {saved} processes, and loads on as many only; here "
                "are "
                f"{self.world_size}. Save with SHARDED_STATE_DICT to load on any number."
            )
        self.used.update(
            other
            for other in self.names
            if re.fullmatch(rf"{re.escape(name.rsplit('_rank', 1)[0])}_rank\d+\.bin", other)
        )
        return content["state"]


def _into(layout: Layout, name: str, value: Any) -> Any:
    """A rank's own part as the tensor that it is a part of."""
    like = layout.tensors.get(name)
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if not value.ndim or value.shape != local(like).shape:
        return value
    made = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    local(made).copy_(value)
    return made


def plan(
    reader: ShardedReader,
    layouts: Sequence[Layout],
    optimizers: Sequence[tuple[Layout, Optimizer, Sequence[str]]],
    strict: bool,
) -> list[Callable[[], Any]]:
    """Read models and optimizers, and return what puts them in their place; every rank must call that, in this order.

    Raises:
        CheckpointError: something is missing, damaged, or does not fit.
    """
    require_count("models", reader.count([MODEL_STEM, SAFE_MODEL_NAME, MODEL_NAME]), len(layouts), reader.folder)
    require_count("optimizers", reader.count([OPTIMIZER_NAME]), len(optimizers), reader.folder)
    changes: list[Callable[[], Any]] = []
    for index, layout in enumerate(layouts):
        state = reader.model(index, layout)
        changes.append(state_dicts.plan_model(layout, state, strict, reader.folder))
    for index, (layout, optimizer, names) in enumerate(optimizers):
        changes.append(plan_optimizer(reader, index, layout, optimizer, names))
    return changes


def plan_optimizer(
    reader: ShardedReader, index: int, layout: Layout, optimizer: Optimizer, names: Sequence[str]
) -> partial[Any]:
    """Read one optimizer, and return what puts its state in place; every rank must call that.

    Raises:
        CheckpointError: something is missing, damaged, or does not fit.
    """
    state = reader.optimizer(index, layout, names)
    if layout.elsewhere or any(isinstance(tensor, DTensor) for tensor in layout.tensors.values()):
        return state_dicts.plan_optimizer(layout, optimizer, state, reader.folder)
    return partial(optimizer.load_state_dict, state_dicts.numbered(state, names, reader.folder))
