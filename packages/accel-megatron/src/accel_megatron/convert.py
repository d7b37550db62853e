"""Conversion between checkpoints of Megatron-LM (format "torch", a file for each rank) and of Transformers.

It needs one process, and neither Megatron-core nor a GPU. Weights are read and written one file at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.safe_load import read as read_safely
from accel.checkpoint.weights_io import save_model_weights, write_atomically
from accel_state.errors import ConfigurationError, require

from .architectures.base import Architecture
from .architectures.registry import ARCHITECTURES, architecture_of
from .layout import LAYER, Sizes, places, sizes_for
from .weights import Weight, join, part_of, split_dim

FILE = "model_optim_rng.pt"
LATEST = "latest_checkpointed_iteration.txt"
# Transformer Engine's layers have the norm in front of a matrix inside of its module.
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def folder_name(sizes: Sizes, tp: int, pp: int, ep: int) -> str:
    """The folder of a rank's file, as Megatron-LM names it."""
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if sizes.pp > 1 else ""
    return name + (f"_{ep:03d}" if sizes.ep > 1 else "")


def model_of(config: str | Path) -> Any:
    """The model of a Transformers configuration, without memory."""
    transformers = require("transformers", purpose="accel megatron convert", install="accel[megatron]")
    settings = transformers.AutoConfig.from_pretrained(str(config))
    if settings.model_type not in ARCHITECTURES:
        raise ConfigurationError(
            f"{config} is of model_type {settings.model_type!r}, which has no mapping to Megatron-core. Mapped: "
            f"{', '.join(ARCHITECTURES)}."
        )
    known = ARCHITECTURES.load(settings.model_type).model_classes
    named = [name for name in settings.architectures or () if name in known]
    with torch.device("meta"):
        return getattr(transformers, (named or known)[0])(settings)


class MegatronFiles:
    """The weights of a checkpoint of Megatron-LM.

    Args:
        path: the checkpoint, or the folder of an iteration in it.
        architecture: that of the model.
        trust: unpickle anything; otherwise files that hold other things than tensors and plain values are refused.
    """

    def __init__(self, path: Path, architecture: Architecture, trust: bool = False) -> None:
        self.folder, self.trust, self.hf = _iteration(path), trust, architecture.hf
        found = {}
        for file in self.folder.glob(f"mp_rank_*/{FILE}"):
            numbers = tuple(map(int, re.findall(r"\d+", file.parent.name)))
            found[numbers] = file
        if not found:
            other = ""
            if (self.folder / "metadata.json").is_file():
                other = (
                    " It has the format torch_dist: convert it with Megatron-LM's --ckpt-convert-format torch first."
                )
            raise ConfigurationError(f"{self.folder} has no mp_rank_.../{FILE}.{other}")
        first = self._load(found[min(found)])
        given = first.get("args")
        ep = int(getattr(given, "expert_model_parallel_size", None) or 1)
        self.files: dict[tuple[int, int, int], Path] = {}
        for numbers, file in found.items():
            tp, *rest = numbers
            # A single further number is that of the stage, or of the experts.
            stage, expert = (*rest, 0, 0)[:2] if len(rest) > 1 or ep == 1 else (0, *rest, 0)[:2]
            self.files[tp, stage, expert] = file
        tp, pp, ep = (max(key[index] for key in self.files) + 1 for index in range(3))
        absent = [key for key in _grid(tp, pp, ep) if key not in self.files]
        if absent:
            raise ConfigurationError(
                f"{self.folder} lacks the file of tensor-parallel rank {absent[0][0]}, stage {absent[0][1]} and "
                f"expert-parallel rank {absent[0][2]}. Copy the files of all ranks."
            )
        chunks = sum(re.fullmatch(r"model\d*", name) is not None for name in first)
        counts = [
            1
            + max(
                (int(match[2]) for name in self.chunk(0, stage, 0, chunk, chunks) if (match := LAYER.match(name))),
                default=-1,
            )
            for chunk in range(chunks)
            for stage in range(pp)
        ]
        self.sizes = Sizes(tp, pp, ep, chunks, tuple(counts))
        expected = architecture.settings()["num_layers"]
        if sum(counts) != expected:
            raise ConfigurationError(f"{self.folder} has {sum(counts)} layers, and the configuration has {expected}.")
        self.experts = int(architecture.settings().get("num_moe_experts") or 1)

    def _load(self, file: Path) -> dict[str, Any]:
        if self.trust:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
            return content
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = read_safely(file, mapped=True)
        return content

    @functools.lru_cache(maxsize=64)  # noqa: B019  # mapped files, which take no memory
    def chunk(self, tp: int, pp: int, ep: int, chunk: int, chunks: int) -> dict[str, torch.Tensor]:
        """The tensors of a chunk in a rank's file."""
        content = self._load(self.files[tp, pp, ep])
        model: dict[str, Any] = content["model" if chunks == 1 else f"model{chunk}"]
        return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}

    def full(self, target: str, pair: Weight, meta: bool = False) -> torch.Tensor:
        """A parameter of all tensor-parallel ranks, without padding; with ``meta`` its size only."""
        pp, chunk, ep, local = self.sizes.place(target, self.experts)
        parts = []
        for tp in range(self.sizes.tp):
            held = self.chunk(tp, pp, ep or 0, chunk, self.sizes.chunks)
            name = next((name for name in _spellings(local) if name in held), None)
            if name is None:
                raise ConfigurationError(
                    f"{self.files[tp, pp, ep or 0]} has no {local}. It has {', '.join(sorted(held)[:4])}, ... Check "
                    "that --config is the configuration of this model."
                )
            parts.append(held[name].to("meta") if meta else held[name])
        dim = split_dim(target)
        return join(parts if dim is not None else parts[:1], dim or 0, pair)


def _spellings(local: str) -> Iterator[str]:
    yield local
    for norm, fused in _FUSED_NORMS.items():
        if norm in local:
            yield local.replace(norm, fused)


def _grid(*sizes: int) -> Iterator[tuple[int, ...]]:
    yield from ((a, b, c) for a in range(sizes[0]) for b in range(sizes[1]) for c in range(sizes[2]))


def _iteration(path: Path) -> Path:
    """The folder with the files of the ranks."""
    latest = path / LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8").strip()
        return path / (f"iter_{int(text):07d}" if text.isdigit() else text)
    return path


class TransformersFiles:
    """The weights in the safetensors files of a folder, by name."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            single = folder / "model.safetensors"
            if not single.is_file():
                raise ConfigurationError(
                    f"{folder} has no model.safetensors and no {index.name}. Save it as safetensors."
                )
            with self._open(single.name) as file:
                self.files = dict.fromkeys(file.keys(), single.name)
        self.prefix = f"{model.base_model_prefix}."
        self.aliases: dict[str, list[str]] = {}
        by_id: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names = by_id.setdefault(id(parameter), [])
            names.append(name)
            self.aliases[name] = names

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(str(self.folder / name), "pt")

    def find(self, name: str) -> str | None:
        """The name of a weight in the files: also without the model's prefix, or another name of a tied weight."""
        for alias in (name, *self.aliases.get(name, ())):
            for spelling in (alias, alias.removeprefix(self.prefix)):
                if spelling in self.files:
                    return spelling
        return None

    def read(self, name: str) -> torch.Tensor:
        """A weight."""
        found = self.find(name)
        if found is None:
            raise ConfigurationError(f"{self.folder} has no {name}. Check that config.json is that of the weights.")
        with self._open(self.files[found]) as file:
            tensor: torch.Tensor = file.get_tensor(found)
        return tensor


def to_transformers(
    source: Path,
    target: Path,
    config: str,
    max_shard_size: str = "5GB",
    dtype: torch.dtype | None = None,
    trust: bool = False,
) -> list[str]:
    """Write the weights of a Megatron checkpoint as sharded safetensors with a ``config.json``; returns the files."""
    model = model_of(config)
    architecture = architecture_of(model)
    files = MegatronFiles(source, architecture, trust)
    pairs = {name: pair for pair in architecture.file_weights() for name in pair.names}

    def tensors_of(pair: Weight, meta: bool = False) -> dict[str, torch.Tensor]:
        made = pair.transform.from_megatron([files.full(item, pair, meta) for item in pair.targets])
        return dict(zip(pair.names, (tensor if dtype is None else tensor.to(dtype) for tensor in made), strict=True))

    def read(names: list[str]) -> dict[str, Any]:
        chosen: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in chosen:
                chosen.update(tensors_of(pairs[name]))
        return {name: chosen[name].contiguous() for name in names}

    sizes: dict[str, torch.Tensor] = {}  # which decide what is in which file
    for pair in architecture.file_weights():
        sizes.update(tensors_of(pair, meta=True))
    _empty(target)
    written = save_model_weights(sizes, target, max_shard_size, True, read)
    saved = model.config
    saved.architectures = [type(model).__name__]
    saved.dtype = next(iter(sizes.values())).dtype
    saved.save_pretrained(str(target))
    return written


def to_megatron(
    source: Path,
    target: Path,
    config: str,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    last: int | None = None,
    per_chunk: int | None = None,
    multiple: int = 128,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write the weights of a Transformers checkpoint as a Megatron checkpoint; returns the files.

    Args:
        source: the folder with safetensors files.
        target: the folder to write to.
        config: the folder or name of the configuration.
        tp: tensor-parallel size.
        pp: number of stages.
        ep: expert-parallel size.
        last: layers of the last stage, if not as many as in the others.
        per_chunk: layers of a chunk of interleaved stages.
        multiple: the vocabulary is padded to a multiple of this times ``tp``.
        dtype: of the written weights; None keeps that of the files.
    """
    model = model_of(config)
    architecture = architecture_of(model)
    settings = architecture.settings()
    if architecture.hf.model_type == "t5" and pp > 1:
        raise ConfigurationError(f"pp_degree={pp}: Megatron-LM has no pipeline of T5. Set it to 1.")
    sizes = sizes_for(architecture, tp, pp, ep, last, per_chunk)
    experts = int(settings.get("num_moe_experts") or 1)
    files = TransformersFiles(source, model)
    pairs = list(architecture.file_weights())
    if not all(files.find(name) for pair in pairs for name in pair.names):
        pairs = list(architecture.weights())
    rows = -(-architecture.vocab_size // (tp * multiple)) * tp * multiple

    @functools.lru_cache(maxsize=1)
    def full(index: int) -> list[torch.Tensor]:
        pair = pairs[index]
        return pair.transform.to_megatron([files.read(name) for name in pair.names])

    _empty(target)
    written = []
    for tp_rank, stage, ep_rank in _grid(tp, pp, ep):
        chunks: list[dict[str, torch.Tensor]] = [{} for _ in range(sizes.chunks)]
        for index, pair in enumerate(pairs):
            for position, name in enumerate(pair.targets):
                for place in places(name, sizes, experts, architecture.tied):
                    if place[0] == stage and place[2] in (None, ep_rank):
                        tensor = part_of(full(index)[position], pair, split_dim(name), tp, tp_rank, rows)
                        tensor = tensor if dtype is None else tensor.to(dtype)
                        chunks[place[1]][place[3]] = tensor.clone(memory_format=torch.contiguous_format)
        for name in architecture.unmapped:
            if stage == pp - 1:
                chunks[-1][name] = torch.zeros(rows // tp, dtype=next(iter(chunks[-1].values())).dtype)
        folder = target / "release" / folder_name(sizes, tp_rank, stage, ep_rank)
        folder.mkdir(parents=True)
        content = {
            "args": argparse.Namespace(**_arguments(settings, sizes, architecture, rows)),
            "checkpoint_version": 3.0,
            "iteration": 0,
            **{"model" if sizes.chunks == 1 else f"model{number}": held for number, held in enumerate(chunks)},
        }
        write_atomically(folder / FILE, functools.partial(torch.save, content))
        written.append(f"release/{folder.name}/{FILE}")
    # Megatron-LM reads this first, so a conversion that was cut short is no checkpoint.
    (target / LATEST).write_text("release", encoding="utf-8")
    return written


def _arguments(settings: dict[str, Any], sizes: Sizes, architecture: Architecture, rows: int) -> dict[str, Any]:
    """What Megatron-LM compares with the arguments of a run."""
    plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
    return {
        **plain,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep,
        "virtual_pipeline_model_parallel_size": sizes.chunks if sizes.chunks > 1 else None,
        "padded_vocab_size": rows,
        "max_position_embeddings": architecture.max_length,
        "untie_embeddings_and_output_weights": not architecture.tied,
    }


def _empty(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise ConfigurationError(f"{target} exists and is not empty. Give a new folder.")
    target.mkdir(parents=True, exist_ok=True)
