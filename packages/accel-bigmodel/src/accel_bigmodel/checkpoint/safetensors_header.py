"""The header of a safetensors file: 8 bytes with its length, then JSON: name -> dtype, shape, byte range.

https://huggingface.co/docs/safetensors/index#format. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from accel_state.errors import ConfigurationError

# By dtype, as the format names it.
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


class InvalidFileError(ConfigurationError, SafetensorError):
    """A file that is not in the safetensors format."""


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of the header, without ``__metadata__``, and the offset in bytes where the data begins.

    The library decides whether the file is valid, so that both accept the same ones: ranges that overlap or leave
    gaps, names that occur twice and values of other types are refused.
    """
    try:
        is_checked = _check_by_library(path)
        length = int.from_bytes(file.read(8), "little")
        if not is_checked:
            return _check_header(file, length), 8 + length
        # Not strict: what the library ignores, such as further keys, must not fail here.
        header: dict[str, Any] = json.loads(file.read(length), strict=False)
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise InvalidFileError(
            f"{path} is not a valid safetensors file: {error}. Download or save it again."
        ) from error
    header.pop("__metadata__", None)
    return {name: _named(entry) for name, entry in header.items()}, 8 + length


def _check_by_library(path: Path) -> bool:
    """Have the library check the header; False if this process has too little address space to map the file."""
    try:
        with safe_open(path, framework="np"):
            return True  # reads no tensor
    except MemoryError:
        return False


def _check_header(file: BinaryIO, length: int) -> dict[str, Any]:
    """Return the entries of a header of ``length`` bytes.

    Raises ValueError unless the tensors fill the rest of the file.

    As the library does, but without mapping the file, for which a process may have too little address space.
    """
    data_bytes = os.fstat(file.fileno()).st_size - 8 - length
    if data_bytes < 0:
        raise ValueError(f"the header has {length} bytes, and the file ends before")
    header = json.loads(file.read(length), strict=False, object_pairs_hook=_without_contradictions)
    if not isinstance(header, dict):
        raise ValueError(f"the header is a {type(header).__name__}")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ does not map names to texts")
    header = {name: _named(entry) for name, entry in header.items()}
    end = 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            (start, stop), shape = entry["data_offsets"], entry["shape"]
            if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
                raise ValueError(f"{name} has offsets or sizes that are not integers of 0 or more")
            if start != end or stop - start != math.prod(shape) * ELEMENT_BYTES[entry["dtype"]]:
                raise ValueError(
                    f"the range {start} to {stop} of {name} leaves a gap, overlaps or does not fit its shape"
                )
            end = stop
    except (KeyError, TypeError) as error:
        raise ValueError(f"an entry is malformed: {error!r}") from error
    if end != data_bytes:
        raise ValueError(f"the tensors have {end} bytes, and the file holds {data_bytes}")
    return header


def _named(entry: Any) -> Any:
    """Return an entry with the names of its values; the library also takes ``["F32", [1], [0, 4]]``."""
    if isinstance(entry, list) and len(entry) == 3:
        return dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))
    return entry


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if entries.setdefault(name, value) != value:
            raise ValueError(f"the name {name!r} occurs twice")
    return entries
