"""The sizes of a model, and reading them from the headers of its safetensors files. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_state.errors import ConfigurationError

from ..checkpoint.files import files_of_index
from ..checkpoint.safetensors_header import ELEMENT_BYTES, read_header

# Bytes of a parameter by the dtype that a model is loaded in.
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}

ADAM_COPIES = 4  # weights, gradients, and two moments


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model in float32.

    Attributes:
        name: the repository, directory or file.
        source: what the sizes come from ("transformers", "timm", "safetensors").
        parameters: number of values.
        total: bytes of all weights and buffers in float32.
        largest_layer: bytes of the largest layer in float32.
        largest_layer_name: the name of that layer.
        whole: number of values in vectors (norms, biases), which tensor parallelism replicates.
    """

    name: str
    source: str
    parameters: int
    total: int
    largest_layer: int
    largest_layer_name: str
    whole: int = 0

    def total_in(self, dtype: str) -> int:
        """Return bytes of the model in a dtype of ``DTYPE_BYTES``."""
        return int(self.total * DTYPE_BYTES[dtype] / 4)

    def largest_layer_in(self, dtype: str) -> int:
        """Return bytes of the largest layer in a dtype of ``DTYPE_BYTES``."""
        return int(self.largest_layer * DTYPE_BYTES[dtype] / 4)

    def adam_in(self, dtype: str) -> int:
        """Return bytes to train the model with Adam in a dtype, without activations."""
        return ADAM_COPIES * self.total_in(dtype)


# Counted in float32, because loading converts them; others (positions, masks) keep their dtype.
_FLOATING = ("F", "BF")  # the first letters of floating point dtypes
# Matrices of these are quantized: one element may pack several values.
_PACKED = {"I8", "U8", "I16", "U16", "I32", "U32"}
# "model.layers.12.mlp.up_proj.weight": the layer is "model.layers.12".
_BLOCK = re.compile(r"^((?:[^.]+\.)*?[^.]+\.\d+)\.")

TensorHeaders = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype as safetensors names it, shape) by name."""


def size_of_tensors(name: str, tensors: TensorHeaders) -> ModelSize:
    """Return the sizes of a model. A layer is a numbered block ("h.3"), or else the module that holds the tensor.

    Raises:
        ConfigurationError: the weights are quantized to integers.
    """
    layers: dict[str, int] = defaultdict(int)
    parameters = whole = 0
    for tensor, (dtype, shape) in tensors.items():
        if dtype in _PACKED and len(shape) > 1 and shape[0] > 1:
            raise ConfigurationError(
                f"{name}: {tensor} is quantized ({dtype}), so the files do not tell how large the model is in another "
                "dtype. Give a directory or repository with a config.json, and --library_name transformers."
            )
        block = _BLOCK.match(tensor)
        layer = block[1] if block else tensor.rpartition(".")[0] or tensor
        layers[layer] += math.prod(shape) * (4 if dtype.startswith(_FLOATING) else ELEMENT_BYTES.get(dtype, 1))
        parameters += math.prod(shape)
        whole += math.prod(shape) if len(shape) < 2 else 0
    largest = max(layers, key=lambda layer: layers[layer])
    return ModelSize(name, "safetensors", parameters, sum(layers.values()), layers[largest], largest, whole)


def read_headers(paths: Iterable[Path]) -> TensorHeaders:
    """Dtype and shape of every tensor of some safetensors files."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    files = list(paths)
    for path in files:
        with path.open("rb") as file:
            header, _ = read_header(file, path)
        tensors |= {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    if not tensors:
        raise ConfigurationError(f"{', '.join(map(str, files))}: no tensors in the file")
    return tensors


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of a file, an index or a directory; empty if there are none."""
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        return files_of(indexes[0]) if len(indexes) == 1 else sorted(path.glob("*.safetensors"))
    if path.name.endswith(".json"):
        return sorted(files_of_index(path))
    return [path] if path.suffix == ".safetensors" else []
