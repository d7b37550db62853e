"""The header of a safetensors file: 8 bytes with its length, then JSON: name -> dtype, shape, byte range.

https://huggingface.co/docs/safetensors/index#format. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from accel_state.errors import ConfigurationError


class InvalidFileError(ConfigurationError, SafetensorError):
    """A file that is not in the safetensors format."""


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The entries of the header, without ``__metadata__``, and the offset in bytes where the data begins.

    The library decides whether the file is valid, so that both accept the same ones: ranges that overlap or leave
    gaps, names that occur twice and values of other types are refused.
    """
    try:
        with safe_open(path, framework="np"):
            pass  # maps the file and checks its header; reads no tensor
        length = int.from_bytes(file.read(8), "little")
        # Not strict: what the library ignores, such as further keys, must not fail here.
        header: dict[str, Any] = json.loads(file.read(length), strict=False)
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise InvalidFileError(
            f"{path} is not a valid safetensors file: {error}. Download or save it again."
        ) from error
    header.pop("__metadata__", None)
    return header, 8 + length
