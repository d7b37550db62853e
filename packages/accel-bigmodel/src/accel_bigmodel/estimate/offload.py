"""Predicting how fast a model generates with offloaded weights, from bandwidths measured with its own files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_state import devices
from accel_state.errors import ConfigurationError

from ..checkpoint.safetensors_file import SafetensorsFile
from .model import files_of, layer_of
from .offload_sample import LayerTensor, bytes_read, measure
from .sources import config_path, read_config

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
        memory_bandwidth: bytes per second with which weights in memory are computed with.
        disk_bandwidth: the same for weights on the disk whose files are not in the page cache.
        cached_bandwidth: the same for those whose files are.
        kept_mapped: the fraction of the weights on the disk that there is room to keep mapped between steps; they are
            computed with like those in memory.
        stays_cached: whether free memory suffices to keep the files on the disk in the page cache between steps.
        without_model: why the bandwidths are those of the matrices alone, without attention, norms and the code around
            them; "" if they are those of the model.
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
    kept_mapped: float = 0.0
    without_model: str = ""

    @property
    def first_step_seconds(self) -> float:
        """Seconds of a step that reads the weights on the disk from it; those in memory have been read."""
        return self.read_in_memory / self.memory_bandwidth + self.read_on_disk / self.disk_bandwidth

    @property
    def step_seconds(self) -> float:
        """Seconds of each later step, which generates a token of every sequence."""
        bandwidth = self.cached_bandwidth if self.stays_cached else self.disk_bandwidth
        mapped = self.kept_mapped * self.read_on_disk
        return (self.read_in_memory + mapped) / self.memory_bandwidth + (self.read_on_disk - mapped) / bandwidth

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences a second, after the first step."""
        return self.sequences / self.step_seconds


def estimate_offload(checkpoint: str | os.PathLike[str], max_memory: int, sequences: int = 1) -> OffloadEstimate:
    """Predict the speed of generation on the CPU with at most ``max_memory`` bytes of weights in memory.

    Layers fill the memory in the order of the model, with room for the largest one, and the rest is on the disk, as in
    ``device_map="sequential"``. Bandwidths are those with which the weights of this checkpoint are computed with. They
    are measured here: a model with its first blocks, up to 512 MiB, generates with weights in memory, in files in the
    page cache, and in files dropped from it. Of models that Transformers does not build, the matrices are multiplied.

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
    bandwidths = measure(path, layers, sequences, bool(on_disk))
    room = devices.get("cpu").memory_free() - _nbytes(in_memory)
    return OffloadEstimate(
        sequences=sequences,
        in_memory=_nbytes(in_memory),
        on_disk=_nbytes(on_disk),
        read_in_memory=bytes_read(in_memory),
        read_on_disk=bytes_read(on_disk),
        memory_bandwidth=bandwidths.memory,
        disk_bandwidth=bandwidths.disk,
        cached_bandwidth=bandwidths.cached,
        stays_cached=_nbytes(on_disk) <= room,
        kept_mapped=_kept_mapped(on_disk, max_memory - _nbytes(in_memory)),
        without_model=bandwidths.without_model,
    )


def _nbytes(layers: Sequence[Sequence[LayerTensor]]) -> int:
    return sum(tensor.entry.nbytes for layer in layers for tensor in layer)


def _kept_mapped(on_disk: Sequence[Sequence[LayerTensor]], room: int) -> float:
    """Return the fraction for which there is room besides the weights in use and those fetched ahead."""
    sizes = [tensor.entry.nbytes for layer in on_disk for tensor in layer if tensor.read == 1]
    return min(max(0, room - 2 * max(sizes)) / sum(sizes), 1.0) if sizes else 0.0


def _chosen_experts(path: Path) -> float:
    """Return the fraction of the experts that a token uses, from the configuration next to the files."""
    config = config_path(str(path if path.is_dir() else path.parent))
    content = read_config(config) if config is not None else {}
    content = {**content, **content.get("text_config", {})}
    total = next(
        (content[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in content), 0
    )
    return content["num_experts_per_tok"] / total if total and "num_experts_per_tok" in content else 1.0


def _layers(files: Sequence[SafetensorsFile], chosen: float, sequences: int) -> list[list[LayerTensor]]:
    """Return the tensors of each layer, in the order of the model as far as names tell."""
    entries = {name: (file, entry) for file in files for name, entry in file.entries.items()}
    embeddings = {name for name, (_, entry) in entries.items() if _EMBEDDING.search(name) and len(entry.shape) == 2}
    if embeddings and not any(_HEAD.search(name) for name in entries):
        embeddings.remove(max(embeddings, key=lambda name: entries[name][1].nbytes))  # the head is tied to it
    experts = 1 - (1 - chosen) ** sequences
    layers: dict[str, list[LayerTensor]] = {}
    for name in sorted(entries, key=_order):
        file, entry = entries[name]
        read = 0.0 if name in embeddings else (experts if _EXPERT.search(name) else 1.0)
        layers.setdefault(layer_of(name), []).append(LayerTensor(file, name, entry, read))
    return list(layers.values())


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, blocks by number, and the rest."""
    place = 0 if _EMBEDDING.search(name) else (1 if re.search(r"\.\d+\.", name) else 2)
    return place, [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _placed(
    layers: list[list[LayerTensor]], max_memory: int
) -> tuple[list[list[LayerTensor]], list[list[LayerTensor]]]:
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
