"""Sizes from the headers of safetensors files: no weight is read, and no code of the model is run."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from accel_state.errors import ConfigurationError

from .model import ModelSize

# Types that become another one when the model is loaded in float16, say; all others (positions, masks) stay what they
# are.
_FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_LARGEST_HEADER = 100_000_000
# "model.layers.12.mlp.up_proj.weight": the layer is "model.layers.12".
_BLOCK = re.compile(r"^((?:[^.]+\.)*?[^.]+\.\d+)\.")

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def size_of_tensors(name: str, tensors: Tensors) -> ModelSize:
    """The sizes of a model whose tensors are known by (type, shape).

    A layer is what has a number in a name ("h.3"), or the module that holds the tensor.
    """
    layers: dict[str, int] = defaultdict(int)
    for tensor, (dtype, shape) in tensors.items():
        block = _BLOCK.match(tensor)
        layers[block[1] if block else tensor.rpartition(".")[0] or tensor] += math.prod(shape) * _width(dtype)
    largest = max(layers, key=lambda layer: layers[layer])
    parameters = sum(math.prod(shape) for _, shape in tensors.values())
    whole = sum(math.prod(shape) for _, shape in tensors.values() if len(shape) < 2)
    return ModelSize(name, "safetensors", parameters, sum(layers.values()), layers[largest], largest, whole)


def _width(dtype: str) -> int:
    return 4 if dtype in _FLOATING else _BYTES.get(dtype, 1)


def read_headers(paths: Iterable[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(type, shape) of every tensor of some safetensors files.

    Raises:
        ConfigurationError: a file is not what its name says, or there are no tensors.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    files = list(paths)
    for path in files:
        header = _header(path)
        header.pop("__metadata__", None)
        tensors |= {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    if not tensors:
        raise ConfigurationError(f"{', '.join(map(str, files))}: there are no tensors in it")
    return tensors


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"its header is a {type(header).__name__}")
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{path} is not a safetensors file that can be read: {error}. Download or save it again."
        ) from error
    return header


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a file, an index (``*.safetensors.index.json``) or a folder; none if it has none.

    Raises:
        ConfigurationError: an index names a file that is not there, or cannot be read.
    """
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        return files_of(indexes[0]) if len(indexes) == 1 else sorted(path.glob("*.safetensors"))
    if path.name.endswith(".json"):
        return _files_of_index(path)
    return [path] if path.suffix == ".safetensors" else []


def _files_of_index(path: Path) -> list[Path]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = sorted(set((content.get("weight_map") or content).values()))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{path} is not the index of a sharded checkpoint: {error}") from error
    missing = [name for name in names if not path.with_name(str(name)).is_file()]
    if missing:
        raise ConfigurationError(
            f"{path} names {missing[0]!r}, which is not beside it. Download the missing {len(missing)} file(s)."
        )
    return [path.with_name(name) for name in names]
