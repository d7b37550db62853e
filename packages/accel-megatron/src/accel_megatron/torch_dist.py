"""Checkpoints of Megatron-core's dist_checkpointing (format "torch_dist"): full tensors in the files of
torch.distributed.checkpoint, whatever the parallel sizes were.

Layers and experts are stacked in one tensor, or saved one by one; both are read, and the first is written. States of
the optimizer have the names of the weights behind a prefix.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.atomic_file import write_atomically
from accel_checkpoint.sharded.reader import SavedTensors
from accel_checkpoint.sharded.writer import TensorWriter
from accel_state.errors import ConfigurationError

from .architectures.base import Architecture
from .rank_files import spellings
from .weights import Weight, part_of

MARK = "metadata.json"
COMMON = "common.pt"
STATE = "optimizer.state."
# An optimizer of dense and one of expert parameters, in checkpoints of older versions.
_PREFIXES = (STATE, f"chained_0.{STATE}", f"chained_1.{STATE}")
_LAYER = re.compile(r"^((?:decoder|encoder)\.layers\.)(\d+)\.(.*)$")
_EXPERT = re.compile(r"^(.*\bexperts\.)local_experts\.(\d+)\.(.*)$")
_FILE_BYTES = 2 * 1024**3


class _Value:
    """Stands for classes in its metadata that are not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


# What its metadata holds besides that of torch: the plans of the ranks that have saved.
_PLANS = {
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
}
_CLASSES = {(module, name): _Value for module, names in _PLANS.items() for name in names.split()}


@dataclass(frozen=True)
class Slot:
    """Where a parameter is."""

    key: str  # the name of a tensor
    index: tuple[int, ...] = ()  # its part at these first indices
    sizes: tuple[int, ...] = ()  # the sizes of these dimensions


def slots(target: str, layers: int, experts: int) -> Iterator[Slot]:
    """Yield where a parameter of Megatron-core may be; the first is where current versions save it."""
    layer = _LAYER.match(target)
    if layer is None:
        yield Slot(target)
        return
    stack, number, rest = layer[1], int(layer[2]), layer[3]
    expert = _EXPERT.match(rest)
    ways = [Slot(rest)]
    if expert is not None:
        before, after, one = f"{expert[1]}experts.", expert[3], int(expert[2])
        ways = [Slot(before + after, (one,), (experts,)), Slot(f"{before}{one}.{after}")]
    for way in ways:
        for key in reversed([*spellings(way.key)]):
            yield Slot(stack + key, (number, *way.index), (layers, *way.sizes))
            yield Slot(f"{stack}{number}.{key}", way.index, way.sizes)


def is_torch_dist(folder: Path) -> bool:
    """Return True if a folder has this format; raises ConfigurationError for another one of dist_checkpointing."""
    if not (folder / MARK).is_file():
        return False
    backend = json.loads((folder / MARK).read_text(encoding="utf-8")).get("sharded_backend")
    if backend not in ("torch_dist", None):
        raise ConfigurationError(
            f"{folder} has the format {backend}, and torch_dist and torch are read. Load it with Megatron-LM, and save "
            "it with --ckpt-format torch_dist."
        )
    return backend is not None


class DistFiles:
    """The tensors of a checkpoint.

    Args:
        folder: the folder of an iteration.
        architecture: that of the model.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.folder: Path = folder
        self.saved: SavedTensors = SavedTensors(folder, _CLASSES)
        settings = architecture.settings()
        self.layers: Any = settings["num_layers"]
        self.experts: int = int(settings.get("num_moe_experts") or 1)

    def full(self, target: str, pair: Weight, meta: bool = False, state: str = "") -> torch.Tensor:
        """Return a parameter without padding, or a state of it; with ``meta`` its size only."""
        for prefix in [start + state + "." for start in _PREFIXES] if state else [""]:
            for slot in slots(target, self.layers, self.experts):
                # A gate and an up projection may be two tensors.
                for ends in ([""], ["_w", "_v"]):
                    names = [prefix + slot.key + end for end in ends]
                    if all(name in self.saved for name in names):
                        parts = [self._read(name, slot, meta) for name in names]
                        full = parts[0] if len(parts) == 1 else torch.cat(parts)
                        return full if pair.rows is None else full[: pair.rows]
        what = f"state {state} of {target}" if state else target
        names = [name for name in self.saved.names if name.startswith("optimizer.") == bool(state)]
        advice = "Check that --config is the configuration of this model."
        if state:
            advice = (
                "States in buckets of the data-parallel ranks (dp_reshardable) have no names: save with Megatron-LM's "
                "--dist-ckpt-optim-fully-reshardable, or leave out --optimizer."
            )
        raise ConfigurationError(f"{self.folder} has no {what}. It has {', '.join(names[:4]) or 'none'}, ... {advice}")

    def has(self, state: str) -> bool:
        """Return True if there are states of a name."""
        starts = tuple(f"{start}{state}." for start in _PREFIXES)
        return any(name.startswith(starts) for name in self.saved.names)

    def _read(self, name: str, slot: Slot, meta: bool) -> torch.Tensor:
        shape = self.saved.shape(name)
        if tuple(shape[: len(slot.sizes)]) != slot.sizes:
            raise ConfigurationError(
                f"{self.folder}: {name} has the sizes {tuple(shape)}, and the configuration has "
                f"{' x '.join(map(str, slot.sizes))} of its first dimension. Check --config."
            )
        if meta:
            return torch.empty(shape[len(slot.index) :], dtype=self.saved.dtype(name), device="meta")
        return self.saved.read(name, slot.index)


Full = tuple[Sequence[Weight], Callable[[int], list[torch.Tensor]]]
"""Weights, and a function that returns the full tensors of Megatron-core for one of them, by its index."""


def write_torch_dist(
    folder: Path, architecture: Architecture, tensors: Mapping[tuple[str, ...], Full], common: dict[str, Any], rows: int
) -> list[str]:
    """Write a checkpoint, one weight at a time; returns the names of the files.

    Args:
        folder: the folder of an iteration, which exists.
        architecture: that of the model.
        tensors: what to write, by what the names of weights begin with: nothing for the weights themselves, and
            :data:`STATE` with the name of a state for what the optimizer has of them.
        common: what dist_checkpointing keeps apart from the tensors.
        rows: rows of the padded vocabulary.
    """
    settings = architecture.settings()
    layers, experts = settings["num_layers"], int(settings.get("num_moe_experts") or 0)
    writer = TensorWriter(folder, _FILE_BYTES)
    modules: dict[Slot, None] = {Slot("output_layer.weight"): None}  # also where its weights are the embedding's
    for prefixes, (pairs, full) in tensors.items():
        dtype = None
        for index, pair in enumerate(pairs):
            for position, target in enumerate(pair.targets):
                tensor = part_of(full(index)[position], pair, None, 1, 0, rows)
                dtype = tensor.dtype
                for slot in _written(target, layers, experts):
                    _add(writer, prefixes, slot, tensor)
                    if target.endswith(".weight"):
                        modules[slot] = None
        for target in architecture.unmapped:
            for slot in _written(target, layers, experts):
                _add(writer, prefixes, slot, torch.zeros(rows, dtype=dtype))
                modules[slot] = None
    # Modules without a state of their own are saved nevertheless, and looked for.
    empty = io.BytesIO()
    torch.save([None], empty)
    for name in sorted({name for slot in modules for name in _extra_states(slot)}):
        writer.add_bytes(name, empty.getvalue())
    written = writer.finish()
    write_atomically(folder / COMMON, functools.partial(torch.save, common))
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / MARK).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}), encoding="utf-8")
    return [*written, COMMON, MARK]


def _written(target: str, layers: int, experts: int) -> Iterator[Slot]:
    slot = next(slots(target, layers, experts))
    yield slot
    if experts and "pre_mlp_layernorm" in target:  # in front of experts, Transformer Engine does not fuse it
        layer = _LAYER.match(target)
        assert layer is not None
        yield Slot(layer[1] + layer[3], slot.index, slot.sizes)
    if target.startswith("lm_head.output_layer."):  # T5Model has it under two names
        yield Slot(target.removeprefix("lm_head."))


def _add(writer: TensorWriter, prefixes: Sequence[str], slot: Slot, tensor: torch.Tensor) -> None:
    part = tensor.reshape((1,) * len(slot.index) + tensor.shape)
    offset = (*slot.index, *(0 for _ in tensor.shape))
    names = [prefix + slot.key for prefix in prefixes]
    writer.add(names, part.contiguous(), (*slot.sizes, *tensor.shape), offset)


def _extra_states(slot: Slot) -> Iterator[str]:
    module = slot.key.removesuffix(".weight").removesuffix(".bias")
    if module.endswith(("_embeddings", "layer_norm_weight")) or "relative_pos_emb" in module:
        return
    places = f"shard_{'.'.join(map(str, slot.index or (0,)))}_{'.'.join(map(str, slot.sizes or (1,)))}"
    yield f"{module}._extra_state/{places}"
    owner, _, name = module.rpartition(".")
    if name in ("linear_qkv", "linear_kv"):
        yield f"{owner}.core_attention._extra_state/{places}"
