"""Conversion of images to byte arrays, and a PNG writer without dependencies."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import ConfigurationError, require
from accel_state.paths import open_for_writing

if TYPE_CHECKING:
    import numpy as np

_CHANNELS = (1, 3, 4)


def as_images(value: Any) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return one or several images as byte arrays of shape (height, width, channels).

    Args:
        value: a PIL image; an array or tensor with 2, 3 or 4 dimensions, of bytes or of numbers from 0 to 1; or a list
            of these. Channels come first in tensors and last in arrays, unless only the other order gives 1, 3 or 4
            channels.

    Raises:
        ConfigurationError: ``value`` is not an image.
    """
    numpy = require("numpy", purpose="logging images", install="numpy")
    if isinstance(value, (list, tuple)):
        return [image for item in value for image in as_images(item)]
    if isinstance(value, torch.Tensor):
        tensor = value.detach().float() if value.dtype is torch.bfloat16 else value.detach()
        return _split(tensor.numpy(), channels_first=True)
    if hasattr(value, "mode") and hasattr(value, "convert"):
        alpha = "A" in value.mode or "transparency" in getattr(value, "info", {})
        value = value if value.mode in ("L", "RGB", "RGBA") else value.convert("RGBA" if alpha else "RGB")
    try:
        array = numpy.asarray(value)
    except Exception as error:
        raise ConfigurationError(
            f"{value!r:.200} is not an image: {error}. Pass a tensor, an array, a PIL image, or a list of these."
        ) from error
    return _split(array, channels_first=False)


def named_images(values: Mapping[str, Any], *, squeeze: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every image with a unique name: ``x``, ``x_1``, ``x_2``.

    ``squeeze`` drops the channel dimension of images with one channel.
    """
    for name, value in values.items():
        for index, image in enumerate(as_images(value)):
            image = image[..., 0] if squeeze and image.shape[-1] == 1 else image
            yield (f"{name}_{index}" if index else name), image


def _split(array: np.ndarray[Any, Any], channels_first: bool) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    if array.ndim == 2:
        array, channels_first = array[..., None], False
    if array.ndim not in (3, 4) or array.dtype.kind not in "buif":
        raise ConfigurationError(
            f"an image cannot have shape {array.shape} and dtype {array.dtype}. Pass (channels, height, width) for a "
            "tensor or (height, width, channels) for an array, with a leading dimension for several images."
        )
    first, last = array.shape[-3] in _CHANNELS, array.shape[-1] in _CHANNELS
    if not (first or last):
        raise ConfigurationError(f"an image of shape {array.shape} has no dimension of 1, 3 or 4 channels.")
    if first and (channels_first or not last):
        array = array.swapaxes(-3, -2).swapaxes(-2, -1)
    return [_bytes(image) for image in (array if array.ndim == 4 else array[None])]


def _bytes(image: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if image.dtype.kind == "b":
        image = image.astype("uint8") * 255
    elif image.dtype.kind == "f":
        image = image.astype("float64")
        image = (image.clip(0.0, 1.0) * 255.0).round()
        image[image != image] = 0.0  # NaN
    return image.clip(0, 255).astype("uint8", order="C")


def write_png(image: np.ndarray[Any, np.dtype[np.uint8]], path: Path) -> None:
    """Write an image of :func:`as_images` as an unfiltered PNG file (https://www.w3.org/TR/png-3/)."""
    height, width, channels = image.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    lines = b"".join(b"\0" + line.tobytes() for line in image)  # filter type 0 precedes each line
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    with open(open_for_writing(path), "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
