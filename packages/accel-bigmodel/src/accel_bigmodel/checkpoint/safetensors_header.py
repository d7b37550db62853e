"""The header of a safetensors file: 8 bytes with its length, then JSON: name -> dtype, shape, byte range.

https://huggingface.co/docs/safetensors/index#format. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from accel_state.errors import ConfigurationError

# The limit of the format: https://github.com/huggingface/safetensors#format
_LARGEST_HEADER = 100_000_000


class InvalidFileError(ConfigurationError, SafetensorError):
    """A file that is not in the safetensors format."""


def read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The entries of the header, without ``__metadata__``, and the offset in bytes where the data begins."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"a header of {length} bytes does not fit in the file")
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__} instead of an object")
    except (ValueError, OSError) as error:
        raise InvalidFileError(
            f"{path} is not a valid safetensors file: {error}. Download or save it again."
        ) from error
    header.pop("__metadata__", None)
    return header, 8 + length
