"""Checkpoints of Megatron-LM in the format "torch": a file for each rank."""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.atomic_file import write_atomically
from accel_checkpoint.safe_load import read as read_safely
from accel_state.errors import ConfigurationError

from .architectures.base import Architecture
from .layout import LAYER, Sizes, places
from .weights import Weight, join, part_of, split_dim

FILE = "model_optim_rng.pt"
# Transformer Engine's layers have the norm in front of a matrix inside of its module.
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def folder_name(sizes: Sizes, tp: int, pp: int, ep: int) -> str:
    """Return the folder of a rank's file, as Megatron-LM names it."""
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if sizes.pp > 1 else ""
    return name + (f"_{ep:03d}" if sizes.ep > 1 else "")


def read_content(file: Path, trust: bool) -> dict[str, Any]:
    """Return a file of Megatron-LM; with ``trust`` any object is unpickled, otherwise tensors and plain values only."""
    if trust:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        return content
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = read_safely(file, mapped=True)
    return content


class RankFiles:
    """The weights of a checkpoint.

    Args:
        folder: the folder of an iteration.
        architecture: that of the model.
        trust: as in :func:`read_content`.
    """

    def __init__(self, folder: Path, architecture: Architecture, trust: bool = False) -> None:
        self.folder: Path = folder
        self.trust: bool = trust
        found = {}
        for file in self.folder.glob(f"mp_rank_*/{FILE}"):
            numbers = tuple(map(int, re.findall(r"\d+", file.parent.name)))
            found[numbers] = file
        if not found:
            raise ConfigurationError(
                f"{self.folder} has no mp_rank_.../{FILE}, and no metadata.json of the format torch_dist."
            )
        first = read_content(found[min(found)], trust)
        given = first.get("args")
        ep = int(getattr(given, "expert_model_parallel_size", None) or 1)
        self.files: dict[tuple[int, ...], Path] = {}
        for numbers, file in found.items():
            tp, *rest = numbers
            # A single further number is that of the stage, or of the experts.
            stage, expert = (*rest, 0, 0)[:2] if len(rest) > 1 or ep == 1 else (0, *rest, 0)[:2]
            self.files[tp, stage, expert] = file
        tp, pp, ep = (max(key[index] for key in self.files) + 1 for index in range(3))
        absent = [key for key in itertools.product(range(tp), range(pp), range(ep)) if key not in self.files]
        if absent:
            raise ConfigurationError(
                f"{self.folder} lacks the file of tensor-parallel rank {absent[0][0]}, stage {absent[0][1]} and "
                f"expert-parallel rank {absent[0][2]}. Copy the files of all ranks."
            )
        chunks = sum(re.fullmatch(r"model\d*", name) is not None for name in first)
        counts = [self._layers(stage, chunk, chunks) for chunk in range(chunks) for stage in range(pp)]
        self.sizes: Sizes = Sizes(tp, pp, ep, chunks, tuple(counts))
        expected = architecture.settings()["num_layers"]
        if sum(counts) != expected:
            raise ConfigurationError(f"{self.folder} has {sum(counts)} layers, and the configuration has {expected}.")
        self.experts: int = int(architecture.settings().get("num_moe_experts") or 1)

    def _layers(self, stage: int, chunk: int, chunks: int) -> int:
        """Return the number of layers of a chunk."""
        matches = map(LAYER.match, self.chunk(0, stage, 0, chunk, chunks))
        return 1 + max((int(match[2]) for match in matches if match), default=-1)

    @functools.lru_cache(maxsize=64)  # noqa: B019  # mapped files, which take no memory
    def chunk(self, tp: int, pp: int, ep: int, chunk: int, chunks: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a chunk in a rank's file."""
        content = read_content(self.files[tp, pp, ep], self.trust)
        model: dict[str, Any] = content["model" if chunks == 1 else f"model{chunk}"]
        return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}

    def full(self, target: str, pair: Weight, meta: bool = False) -> torch.Tensor:
        """Return a parameter of all tensor-parallel ranks, without padding; with ``meta`` its size only."""
        pp, chunk, ep, local = self.sizes.place(target, self.experts)
        parts = []
        for tp in range(self.sizes.tp):
            held = self.chunk(tp, pp, ep or 0, chunk, self.sizes.chunks)
            name = next((name for name in spellings(local) if name in held), None)
            if name is None:
                raise ConfigurationError(
                    f"{self.files[tp, pp, ep or 0]} has no {local}. It has {', '.join(sorted(held)[:4])}, ... Check "
                    "that --config is the configuration of this model."
                )
            parts.append(held[name].to("meta") if meta else held[name])
        dim = split_dim(target)
        return join(parts if dim is not None else parts[:1], dim or 0, pair)


def spellings(local: str) -> Iterator[str]:
    """Yield the names of a parameter in a layer: its own, and that of Transformer Engine."""
    yield local
    for norm, fused in FUSED_NORMS.items():
        if norm in local:
            yield local.replace(norm, fused)


def write_rank_files(
    folder: Path,
    architecture: Architecture,
    pairs: Sequence[Weight],
    full: Callable[[int], list[torch.Tensor]],
    sizes: Sizes,
    common: dict[str, Any],
    rows: int,
) -> Iterator[str]:
    """Write the file of one rank after the other; yields their names.

    Args:
        folder: the folder of an iteration.
        architecture: that of the model.
        pairs: the weights.
        full: the full tensors of Megatron-core for an element of ``pairs``.
        sizes: the parallel sizes.
        common: what else each file has.
        rows: rows of the padded vocabulary.
    """
    experts = int(architecture.settings().get("num_moe_experts") or 1)
    for tp, stage, ep in itertools.product(range(sizes.tp), range(sizes.pp), range(sizes.ep)):
        chunks: list[dict[str, torch.Tensor]] = [{} for _ in range(sizes.chunks)]
        for index, pair in enumerate(pairs):
            for position, name in enumerate(pair.targets):
                for place in places(name, sizes, experts, architecture.tied):
                    if place[0] == stage and place[2] in (None, ep):
                        part = part_of(full(index)[position], pair, split_dim(name), sizes.tp, tp, rows)
                        chunks[place[1]][place[3]] = part.clone(memory_format=torch.contiguous_format)
        for name in architecture.unmapped:
            if stage == sizes.pp - 1:
                chunks[-1][name] = torch.zeros(rows // sizes.tp, dtype=next(iter(chunks[-1].values())).dtype)
        target = folder / folder_name(sizes, tp, stage, ep) / FILE
        target.parent.mkdir(parents=True)
        models = {"model" if sizes.chunks == 1 else f"model{number}": held for number, held in enumerate(chunks)}
        write_atomically(target, functools.partial(torch.save, {**common, **models}))
        yield f"{target.parent.name}/{FILE}"
