"""The part of a checkpoint that is run to measure how fast its weights are computed with."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..checkpoint.checkpoint_mapping import logger as mapping_logger
from ..checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from ..dispatch import dispatch_model, load_checkpoint_and_dispatch
from ..init_empty import init_empty_weights

SAMPLE_BYTES = 512 * 2**20
# Steps from memory and from the page cache, in turns. Their mean counts: what else runs on the machine slows generation
# by the same factor, while the fastest of short steps would miss it.
_STEPS = 8
_COLD_STEPS = 2
_COMPUTED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}

Step = Callable[[], object]
"""Computes with the sample once."""


@dataclass(frozen=True)
class LayerTensor:
    """A stored tensor."""

    file: SafetensorsFile
    name: str
    entry: TensorEntry
    read: float  # the fraction of its bytes that a step reads


def bytes_read(layers: Sequence[Sequence[LayerTensor]]) -> float:
    """Return bytes that a step reads."""
    return sum(tensor.entry.nbytes * tensor.read for layer in layers for tensor in layer)


@dataclass(frozen=True)
class Bandwidths:
    """Bytes of weights that are computed with a second.

    Attributes:
        memory: in memory.
        cached: in files in the page cache.
        disk: in files that are not.
        without_model: why the matrices were measured without the rest of the model; "" if the model was.
    """

    memory: float
    cached: float
    disk: float
    without_model: str


@torch.no_grad()
def measure(path: Path, layers: Sequence[Sequence[LayerTensor]], sequences: int, is_split: bool) -> Bandwidths:
    """Run the first blocks of a checkpoint.

    Args:
        path: the checkpoint.
        layers: the tensors of each layer.
        sequences: rows of the input.
        is_split: some weights are on the disk, so that modules in memory have hooks too.
    """
    sample = _first_blocks(layers)
    matrices = _matrices(sample)
    if not any(len(tensor.entry.shape) == 2 for tensor in matrices):
        raise ConfigurationError(
            "the files hold no matrices in a floating point dtype of at least 16 bits, with which a CPU could compute: "
            "--offload predicts the speed of such models only"
        )
    try:
        model = _Generation(path, sample, sequences, is_split)
        return _measure(model.start, sample, bytes_read(sample))
    except Exception as error:  # whatever building, loading and running a model of another library raises
        reason = " ".join(str(error).split()) or type(error).__name__
    keys = {(tensor.entry.shape[-1], tensor.entry.dtype) for tensor in matrices}
    inputs = {key: torch.ones(sequences, key[0]).to(key[1]) for key in keys}

    def start(location: str) -> Step:
        model = _dispatched(matrices, location)
        return lambda: model(inputs)

    return _measure(start, sample, sum(tensor.entry.nbytes for tensor in matrices), reason)


def _measure(
    start: Callable[[str], Step], sample: Sequence[Sequence[LayerTensor]], nbytes: float, reason: str = ""
) -> Bandwidths:
    files = {id(tensor.file): tensor.file for layer in sample for tensor in layer}
    gc.collect()  # pages that a model which is no longer used has mapped would stay in the page cache
    on_disk = start("disk")
    on_disk()  # what a first call sets up
    cold = 0.0
    for _ in range(_COLD_STEPS):
        for file in files.values():
            drop_from_page_cache(file.path)
        cold += _seconds(on_disk)
    in_memory = start("cpu")
    in_memory()  # maps the pages
    cached = memory = 0.0
    for _ in range(_STEPS):
        cached += _seconds(on_disk)
        memory += _seconds(in_memory)
    return Bandwidths(nbytes * _STEPS / memory, nbytes * _STEPS / cached, nbytes * _COLD_STEPS / cold, reason)


def _seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def drop_from_page_cache(path: str | os.PathLike[str]) -> None:
    """Drop a file from the page cache, except pages that a process has mapped."""
    if not hasattr(os, "posix_fadvise"):
        return  # the bandwidth of the disk is then that of the page cache, if the file is there
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())  # pages that are not written yet would stay
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_block(layer: Sequence[LayerTensor]) -> bool:
    return any(part.isdigit() for part in layer[0].name.split("."))


def _first_blocks(layers: Sequence[Sequence[LayerTensor]]) -> list[Sequence[LayerTensor]]:
    """As many blocks as the sample may have, at least one, and what is not a block."""
    sample, blocks, nbytes = [], 0, 0
    for layer in layers:
        if _is_block(layer):
            nbytes += sum(tensor.entry.nbytes for tensor in layer)
            blocks += 1
            if blocks > 1 and nbytes > SAMPLE_BYTES:
                continue
        sample.append(layer)
    return sample


class _Generation:
    """Generation with the model that Transformers builds for the checkpoint, with fewer blocks."""

    def __init__(self, path: Path, sample: Sequence[Sequence[LayerTensor]], sequences: int, is_split: bool) -> None:
        import transformers

        self.path, self.sequences, self.is_split = path, sequences, is_split
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise ConfigurationError(f"{folder} has no config.json")
        self.config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self.config.num_hidden_layers = blocks = sum(map(_is_block, sample))
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = self.config.layer_types[:blocks]
        self.build: Any = transformers.AutoModelForCausalLM.from_config
        largest = max((tensor for layer in sample for tensor in layer), key=lambda tensor: tensor.entry.nbytes)
        self.dtype, self.room = largest.entry.dtype, 2 * largest.entry.nbytes

    def start(self, location: str) -> Step:
        """Load the model, and return what generates the next token."""
        with init_empty_weights():
            model = self.build(self.config).eval()
        with _without_unexpected_names():
            load_checkpoint_and_dispatch(
                model,
                self.path,
                device_map={"": location},
                # Modules in use and fetched ahead; in the model as a whole few of them stay mapped.
                max_memory={"cpu": self.room},
                dtype=self.dtype,
                force_hooks=self.is_split,
            )
        tokens, cache = torch.ones(self.sequences, 1, dtype=torch.int64), None

        def step() -> None:
            nonlocal tokens, cache
            output = model(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values

        return step


@contextlib.contextmanager
def _without_unexpected_names() -> Iterator[None]:
    """No list in the log of the blocks that the sample lacks."""

    def refuse(record: Any) -> bool:
        return False

    mapping_logger.addFilter(refuse)
    try:
        yield
    finally:
        mapping_logger.removeFilter(refuse)


# The matrices alone, of models that Transformers does not build.


def _matrices(layers: Sequence[Sequence[LayerTensor]]) -> list[LayerTensor]:
    """Return the tensors that a layer multiplies with."""
    used = [tensor for layer in layers for tensor in layer if tensor.read and 1 <= len(tensor.entry.shape) <= 2]
    return [tensor for tensor in used if tensor.entry.dtype in _COMPUTED]


class _Scale(nn.Module):
    """A module with a vector, as norms have."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


class _Matrices(nn.Module):
    def __init__(self, sample: Sequence[LayerTensor]) -> None:
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


def _dispatched(sample: Sequence[LayerTensor], location: str) -> nn.Module:
    with torch.device("meta"):
        model = _Matrices(sample)
    index = {
        f"layers.{number}.weight": {
            "safetensors_file": str(tensor.file.path),
            "weight_name": tensor.name,
            "dtype": str(tensor.entry.dtype).removeprefix("torch."),
        }
        for number, tensor in enumerate(sample)
    }
    return dispatch_model(model, {"": location}, offload_index=index)
