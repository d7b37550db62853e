"""Conversion between checkpoints of Megatron-LM and of Transformers.

It needs one process, and neither Megatron-core nor a GPU. Weights are read and written one file at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from accel.core.weights_io import save_model_weights
from accel_state.errors import ConfigurationError, require

from .architectures.base import Architecture
from .architectures.registry import ARCHITECTURES, architecture_of
from .layout import Sizes, sizes_for
from .optimizer_file import MOMENTS, OptimizerFile, write_optimizer
from .rank_files import RankFiles, read_content, write_rank_files
from .torch_dist import COMMON, STATE, DistFiles, Full, is_torch_dist, write_torch_dist
from .weights import Weight, aliases_of

LATEST = "latest_checkpointed_iteration.txt"


def model_of(config: str | Path) -> Any:
    """Return the model of a Transformers configuration, without memory."""
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


def iteration_folder(path: Path) -> Path:
    """Return the folder with the files of the ranks."""
    latest = path / LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8").strip()
        return path / (f"iter_{int(text):07d}" if text.isdigit() else text)
    return path


def is_megatron(source: Path) -> bool:
    """Return True if a folder is a checkpoint of Megatron-LM, or that of an iteration."""
    return (source / LATEST).is_file() or any(source.glob("mp_rank_*")) or is_torch_dist(source)


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
        self.prefix: str = f"{model.base_model_prefix}."
        self.aliases: dict[str, list[str]] = {name: names for names in aliases_of(model).values() for name in names}

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(str(self.folder / name), "pt")

    def find(self, name: str) -> str | None:
        """Return a weight's name in the files: also without the model's prefix, or another name of a tied weight."""
        for alias in (name, *self.aliases.get(name, ())):
            for spelling in (alias, alias.removeprefix(self.prefix)):
                if spelling in self.files:
                    return spelling
        return None

    def read(self, name: str) -> torch.Tensor:
        """Return a weight."""
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
    optimizer: bool = False,
) -> list[str]:
    """Write the weights of a Megatron checkpoint as sharded safetensors with a ``config.json``; returns the files.

    Args:
        source: the checkpoint, or the folder of an iteration in it.
        target: the folder to write to.
        config: the folder or name of the Transformers configuration.
        max_shard_size: largest file of weights.
        dtype: of the written weights; None keeps that of the checkpoint.
        trust: unpickle anything; otherwise files that hold other things than tensors and plain values are refused.
        optimizer: write the state of the optimizer too, as ``optimizer.bin``; the weights are then the float32 ones
            that the optimizer updates.
    """
    model = model_of(config)
    architecture = architecture_of(model)
    folder = iteration_folder(source)
    is_dist = is_torch_dist(folder)
    files = DistFiles(folder, architecture) if is_dist else RankFiles(folder, architecture, trust)
    full: Callable[..., torch.Tensor] = files.full
    if optimizer:
        if not isinstance(files, DistFiles):
            raise ConfigurationError(
                f"--optimizer: {folder} has the format torch, whose optimizer states have an order of their own. Save "
                "it in the format torch_dist, or leave out --optimizer."
            )
        pair = next(iter(architecture.weights()))
        files.full(pair.targets[0], pair, meta=True, state=MOMENTS[0])  # raises before anything is written
        main = next((name for name in ("fp32_param", "param") if files.has(name)), "")
        full = functools.partial(files.full, state=main)
    pairs = {name: pair for pair in architecture.file_weights() for name in pair.names}

    def tensors_of(pair: Weight, meta: bool = False) -> dict[str, torch.Tensor]:
        made = pair.transform.from_megatron([full(item, pair, meta) for item in pair.targets])
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
    if isinstance(files, DistFiles) and optimizer:
        written.append(_write_states(files, architecture, model, target, read_content(folder / COMMON, trust)))
    saved = model.config
    saved.architectures = [type(model).__name__]
    saved.dtype = next(iter(sizes.values())).dtype
    saved.save_pretrained(str(target))
    return written


def _write_states(
    files: DistFiles, architecture: Architecture, model: Any, target: Path, common: dict[str, Any]
) -> str:
    pairs = {name: pair for pair in architecture.weights() for name in pair.names}
    held = common.get("optimizer") or {}
    # One for dense and one for expert parameters, or in half precision one inside of another.
    while "param_groups" not in held:
        inner = next((held[key] for key in ("optimizer", 0) if isinstance(held.get(key), dict)), None)
        if inner is None:
            raise ConfigurationError(f"--optimizer: {files.folder / COMMON} has no settings of an optimizer.")
        held = inner
    groups = held["param_groups"]
    step = (held.get("state") or {}).get("common_step") or next((g["step"] for g in groups if "step" in g), 0)

    @functools.lru_cache(maxsize=2)
    def states(names: tuple[str, ...], key: str) -> dict[str, torch.Tensor]:
        pair = pairs[names[0]]
        full = [files.full(item, pair, state=key) for item in pair.targets]
        return dict(zip(pair.names, pair.transform.from_megatron(full), strict=True))

    def read(name: str, key: str) -> torch.Tensor:
        return states(pairs[name].names, key)[name]

    names = [(name, item.ndim) for name, item in model.named_parameters() if name in pairs]
    return write_optimizer(target, groups, names, read, int(step))


def to_megatron(
    source: Path,
    target: Path,
    config: str,
    *,
    kind: str = "torch",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    last: int | None = None,
    per_chunk: int | None = None,
    multiple: int = 128,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
) -> list[str]:
    """Write the weights of a Transformers checkpoint as a Megatron checkpoint; returns the files.

    Args:
        source: the folder with safetensors files.
        target: the folder to write to.
        config: the folder or name of the configuration.
        kind: the format: "torch", or "torch_dist", which any parallel sizes load.
        tp: tensor-parallel size.
        pp: number of stages.
        ep: expert-parallel size.
        last: layers of the last stage, if not as many as in the others.
        per_chunk: layers of a chunk of interleaved stages.
        multiple: the vocabulary is padded to a multiple of this times ``tp``.
        dtype: of the written weights; None keeps that of the files.
        optimizer: write the state of the optimizer in ``source`` too; in the format torch_dist.
    """
    model = model_of(config)
    architecture = architecture_of(model)
    if kind == "torch":
        reason = "Write the format torch_dist, with --format torch_dist."
        if optimizer:
            raise ConfigurationError(f"--optimizer: optimizer states in the format torch have no names. {reason}")
        if architecture.hf.model_type == "t5" and pp > 1:
            raise ConfigurationError(f"pp_degree={pp}: Megatron-LM has no pipeline of T5. Set it to 1. {reason}")
    sizes = sizes_for(architecture, tp, pp, ep, last, per_chunk)
    files = TransformersFiles(source, model)
    pairs = list(architecture.file_weights())
    if not all(files.find(name) for pair in pairs for name in pair.names):
        pairs = list(architecture.weights())
    rows = -(-architecture.vocab_size // (tp * multiple)) * tp * multiple
    full = _full(pairs, files.read, dtype)
    common = {
        "args": argparse.Namespace(**_arguments(architecture, sizes, rows)),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    name = "release"
    tensors: dict[tuple[str, ...], Full] = {("",): (pairs, full)}
    if optimizer:
        held, every = OptimizerFile(source, model), list(architecture.weights())
        name, common["iteration"] = f"iter_{held.step:07d}", held.step
        common["optimizer"] = held.core_state(separate_experts=ep > 1)
        # The float32 weights, as the optimizer of half precision and the distributed one name them.
        main = (f"{STATE}fp32_param.", f"{STATE}param.")
        if dtype in (None, torch.float32):
            tensors = {("", *main): (pairs, full)}
        else:
            tensors[main] = pairs, _full(pairs, files.read, torch.float32)
        for key in MOMENTS:
            tensors[f"{STATE}{key}.",] = every, _full(every, functools.partial(held.read, key=key), torch.float32)
    _empty(target)
    folder = target / name
    folder.mkdir()
    if kind == "torch":
        written = list(write_rank_files(folder, architecture, pairs, full, sizes, common, rows))
    else:
        written = write_torch_dist(folder, architecture, tensors, common, rows)
    # Megatron-LM reads this first, so a conversion that was cut short is no checkpoint.
    (target / LATEST).write_text(str(common["iteration"]) if optimizer else name, encoding="utf-8")
    return [f"{name}/{item}" for item in written]


def _full(
    pairs: Sequence[Weight], read: Callable[[str], torch.Tensor], dtype: torch.dtype | None
) -> Callable[[int], list[torch.Tensor]]:
    """Return a function that returns the full tensors of Megatron-core for one of the pairs, by its index."""

    @functools.lru_cache(maxsize=1)
    def full(index: int) -> list[torch.Tensor]:
        pair = pairs[index]
        made = pair.transform.to_megatron([read(name) for name in pair.names])
        return made if dtype is None else [tensor.to(dtype) for tensor in made]

    return full


def _arguments(architecture: Architecture, sizes: Sizes, rows: int) -> dict[str, Any]:
    """Return what Megatron-LM compares with the arguments of a run."""
    settings = architecture.settings()
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
