"""Predicting how fast a model generates with offloaded weights, from bandwidths measured with its own files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state import devices
from accel_state.errors import ConfigurationError

from ..checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from ..dispatch import dispatch_model
from .model import files_of, layer_of
from .sources import config_path, read_config

SAMPLE_BYTES = 512 * 2**20
# Passes over the sample. Their mean counts: what else runs on the machine slows generation by the same factor, while
# the fastest of short passes would miss it.
_PASSES = 8
_COMPUTED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_EMBEDDING = re.compile(r"embed|wte|wpe|shared\.weight$")
_HEAD = re.compile(r"lm_head|embed_out|^output\.|^head\.|cls\.predictions")
_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class OffloadEstimate:
    """The predicted speed of generation with a part of the weights on the disk.

    Attributes:
        sequences: sequences that are generated in one batch.
        in_memory: bytes of weights that stay in memory.
        on_disk: bytes of weights on the disk.
        read_in_memory: bytes of the first that a step reads: no rows of embeddings, only chosen experts.
        read_on_disk: bytes of the second that a step reads.
        memory_bandwidth: bytes a second with which weights in memory are computed with.
        disk_bandwidth: the same for weights on the disk whose files are not in the page cache.
        cached_bandwidth: the same for those whose files are.
        stays_cached: whether free memory suffices to keep the files on the disk in the page cache between steps.
    """

    sequences: int
    in_memory: int
    on_disk: int
    read_in_memory: float
    read_on_disk: float
    memory_bandwidth: float
    disk_bandwidth: float
    cached_bandwidth: float
    stays_cached: bool

    @property
    def first_step_seconds(self) -> float:
        """Seconds of a step that reads the files from the disk."""
        return self.read_in_memory / self.memory_bandwidth + self.read_on_disk / self.disk_bandwidth

    @property
    def step_seconds(self) -> float:
        """Seconds of each later step, which generates a token of every sequence."""
        bandwidth = self.cached_bandwidth if self.stays_cached else self.disk_bandwidth
        return self.read_in_memory / self.memory_bandwidth + self.read_on_disk / bandwidth

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences a second, after the first step."""
        return self.sequences / self.step_seconds


@dataclass(frozen=True)
class _Tensor:
    file: SafetensorsFile
    name: str
    entry: TensorEntry
    read: float  # the fraction of its bytes that a step reads


def estimate_offload(checkpoint: str | os.PathLike[str], max_memory: int, sequences: int = 1) -> OffloadEstimate:
    """Predict the speed of generation on the CPU with at most ``max_memory`` bytes of weights in memory.

    Layers fill the memory in the order of the model, with room for the largest one, and the rest is on the disk, as in
    ``device_map="sequential"``. Bandwidths are those with which layers of this checkpoint are computed with, measured
    here for up to 512 MiB of them: in memory, from files in the page cache, and from files dropped from it.

    Args:
        checkpoint: a local directory, index or file with safetensors.
        max_memory: bytes for weights.
        sequences: sequences in a batch.

    Raises:
        ConfigurationError: no local safetensors files; or less memory than the largest layer.
    """
    path = Path(checkpoint)
    files = [SafetensorsFile(file) for file in files_of(path)] if path.exists() else []
    if not files:
        raise ConfigurationError(
            f"--offload measures with the model's own files, and {checkpoint} has no local safetensors files. Download "
            f"them first (hf download {checkpoint}), and give their directory."
        )
    layers = _layers(files, _chosen_experts(path), sequences)
    in_memory, on_disk = _placed(layers, max_memory)
    sample = _sample([*on_disk, *in_memory])
    memory, cached, disk = _bandwidths(sample, sequences)
    room = devices.get("cpu").memory_free() - _nbytes(in_memory)
    return OffloadEstimate(
        sequences=sequences,
        in_memory=_nbytes(in_memory),
        on_disk=_nbytes(on_disk),
        read_in_memory=_read(in_memory),
        read_on_disk=_read(on_disk),
        memory_bandwidth=memory,
        disk_bandwidth=disk,
        cached_bandwidth=cached,
        stays_cached=_nbytes(on_disk) <= room,
    )


def _nbytes(layers: Sequence[Sequence[_Tensor]]) -> int:
    return sum(tensor.entry.nbytes for layer in layers for tensor in layer)


def _read(layers: Sequence[Sequence[_Tensor]]) -> float:
    return sum(tensor.entry.nbytes * tensor.read for layer in layers for tensor in layer)


def _chosen_experts(path: Path) -> float:
    """The fraction of the experts that a token uses, from the configuration beside the files."""
    config = config_path(str(path if path.is_dir() else path.parent))
    content = read_config(config) if config is not None else {}
    content = {**content, **content.get("text_config", {})}
    total = next(
        (content[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in content), 0
    )
    return content["num_experts_per_tok"] / total if total and "num_experts_per_tok" in content else 1.0


def _layers(files: Sequence[SafetensorsFile], chosen: float, sequences: int) -> list[list[_Tensor]]:
    """The tensors of each layer, in the order of the model as far as names tell."""
    entries = {name: (file, entry) for file in files for name, entry in file.entries.items()}
    embeddings = {name for name, (_, entry) in entries.items() if _EMBEDDING.search(name) and len(entry.shape) == 2}
    if embeddings and not any(_HEAD.search(name) for name in entries):
        embeddings.remove(max(embeddings, key=lambda name: entries[name][1].nbytes))  # the head is tied to it
    experts = 1 - (1 - chosen) ** sequences
    layers: dict[str, list[_Tensor]] = {}
    for name in sorted(entries, key=_order):
        file, entry = entries[name]
        read = 0.0 if name in embeddings else (experts if _EXPERT.search(name) else 1.0)
        layers.setdefault(layer_of(name), []).append(_Tensor(file, name, entry, read))
    return list(layers.values())


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, blocks by number, and the rest."""
    place = 0 if _EMBEDDING.search(name) else (1 if re.search(r"\.\d+\.", name) else 2)
    return place, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _placed(layers: list[list[_Tensor]], max_memory: int) -> tuple[list[list[_Tensor]], list[list[_Tensor]]]:
    sizes = [_nbytes([layer]) for layer in layers]
    if sum(sizes) <= max_memory:
        return layers, []
    room = max_memory - max(sizes)
    if room < 0:
        raise ConfigurationError(
            f"max_memory of {max_memory} bytes is less than the largest layer, which must fit: {max(sizes)} bytes"
        )
    count = 0
    while sizes[count] <= room:
        room -= sizes[count]
        count += 1
    return layers[:count], layers[count:]


def _sample(layers: Sequence[Sequence[_Tensor]]) -> list[_Tensor]:
    """Tensors of whole layers, from the first on, that a layer multiplies with."""
    sample: list[_Tensor] = []
    for layer in layers:
        used = [tensor for tensor in layer if tensor.read and 1 <= len(tensor.entry.shape) <= 2]
        used = [tensor for tensor in used if tensor.entry.dtype in _COMPUTED]
        if sample and sum(tensor.entry.nbytes for tensor in (*sample, *used)) > SAMPLE_BYTES:
            break
        sample += used
    if not any(len(tensor.entry.shape) == 2 for tensor in sample):
        raise ConfigurationError(
            "the files hold no matrices in a floating point dtype of at least 16 bits, with which a CPU could compute: "
            "--offload predicts the speed of such models only"
        )
    return sample


class _Scale(nn.Module):
    """A module with a vector, as norms have."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class _Layers(nn.Module):
    def __init__(self, sample: Sequence[_Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for tensor in sample:
            shape, dtype = tensor.entry.shape, tensor.entry.dtype
            is_matrix = len(shape) == 2
            self.layers.append(
                nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) if is_matrix else _Scale(shape[0], dtype)
            )

    def forward(self, inputs: Mapping[Any, torch.Tensor]) -> None:
        for layer in self.layers:
            weight: Any = layer.weight
            layer(inputs[weight.shape[-1], weight.dtype])


def _dispatched(sample: Sequence[_Tensor], location: str) -> nn.Module:
    with torch.device("meta"):
        model = _Layers(sample)
    index = {
        f"layers.{number}.weight": {
            "safetensors_file": str(tensor.file.path),
            "weight_name": tensor.name,
            "dtype": str(tensor.entry.dtype).removeprefix("torch."),
        }
        for number, tensor in enumerate(sample)
    }
    return dispatch_model(model, {"": location}, offload_index=index)


@torch.no_grad()
def _bandwidths(sample: Sequence[_Tensor], rows: int) -> tuple[float, float, float]:
    """Bytes a second in memory, from the page cache and from the disk."""
    keys = {(tensor.entry.shape[-1], tensor.entry.dtype) for tensor in sample}
    inputs = {key: torch.ones(rows, key[0]).to(key[1]) for key in keys}
    nbytes = sum(tensor.entry.nbytes for tensor in sample)
    for file in {id(tensor.file): tensor.file for tensor in sample}.values():
        _drop_from_page_cache(file)
    on_disk = _dispatched(sample, "disk")
    disk = _seconds(on_disk, inputs)
    cached = sum(_seconds(on_disk, inputs) for _ in range(_PASSES)) / _PASSES
    in_memory = _dispatched(sample, "cpu")
    _seconds(in_memory, inputs)  # maps the pages
    memory = sum(_seconds(in_memory, inputs) for _ in range(_PASSES)) / _PASSES
    return nbytes / memory, nbytes / cached, nbytes / disk


def _seconds(model: nn.Module, inputs: Mapping[Any, torch.Tensor]) -> float:
    begin = time.perf_counter()
    model(inputs)
    return time.perf_counter() - begin


def _drop_from_page_cache(file: SafetensorsFile) -> None:
    if not hasattr(os, "posix_fadvise"):
        return  # the bandwidth of the disk is then that of the page cache, if the files are there
    with open(file.path, "rb") as opened:
        os.fsync(opened.fileno())  # pages that are not written yet would stay
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
