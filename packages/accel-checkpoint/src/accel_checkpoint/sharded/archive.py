"""Looks into what ``torch.save`` has written for one tensor, without unpickling or copying it."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Iterator

import torch

# What the directory at the end of an archive of one tensor fits in, and what is in front of its data.
TAIL_BYTES = 2048
HEAD_BYTES = 2048

Descriptions = dict[bytes, "tuple[torch.dtype, torch.Size] | None"]
"""What is known of tensors by their pickled description; None of those that are not plain."""


# Records of a ZIP archive (APPNOTE.TXT, 4.3.12 and 4.3.16): a file of the directory, and the directory's end. Between
# them torch writes two more, for archives of more than 4 GiB.
_ENTRY = struct.Struct("<4s6xH12xIHHH8xI")
_END = struct.Struct("<4s6xHI4x2x")
_ZIP64_END_BYTES = 56 + 20
_IN_EXTRA_FIELD = 2**32 - 1


def _entries(content: memoryview) -> Iterator[tuple[str, int, int, int]]:
    """Name, place of the header, size in bytes, and compression of each file.

    zipfile knows them too, and takes as long to find them as a small tensor takes to read.

    Raises:
        ValueError: the content does not end as ``torch.save`` ends an archive.
        struct.error: the same, if it is cut off.
    """
    signature, count, size = _END.unpack(content[-_END.size :])
    place = len(content) - _END.size - size
    if bytes(content[place : place + 4]) != b"PK\1\2":
        place -= _ZIP64_END_BYTES
    if signature != b"PK\5\6" or place < 0:
        raise ValueError("no directory")
    for _ in range(count):
        signature, compression, size, name_length, extra_length, comment_length, header = _ENTRY.unpack_from(
            content, place
        )
        if signature != b"PK\1\2":
            raise ValueError("not an entry of a directory")
        place += _ENTRY.size
        name = bytes(content[place : place + name_length]).decode()
        place += name_length
        if size == _IN_EXTRA_FIELD:
            kind, size = struct.unpack_from("<H2xQ", content, place)
            if kind != 1:
                raise ValueError("a size is missing")
        place += extra_length + comment_length
        yield name, header, size, compression


def data_range(content: memoryview) -> tuple[int, int, bytes] | None:
    """Return where the data of an archive of one tensor begins and ends, and its description; None for anything else.

    Only the first and the last bytes are checked (:data:`HEAD_BYTES`, :data:`TAIL_BYTES`).
    """
    places: dict[str, tuple[int, int]] = {}
    try:
        for path, header, size, compression in _entries(content):
            name = path.partition("/")[2]
            if name not in ("data.pkl", "byteorder", "data/0"):
                if name == "data/1":
                    return None
                continue
            name_length, extra_length = struct.unpack_from("<HH", content, header + 26)
            begin = header + 30 + name_length + extra_length
            places[name] = begin, begin + size
            if compression != zipfile.ZIP_STORED or begin + size > len(content):
                return None
    except (ValueError, struct.error):
        return None
    if set(places) != {"data.pkl", "byteorder", "data/0"}:
        return None
    if bytes(content[slice(*places["byteorder"])]) != sys.byteorder.encode():
        return None
    return (*places["data/0"], bytes(content[slice(*places["data.pkl"])]))


def described(content: memoryview, description: bytes, known: Descriptions) -> tuple[torch.dtype, torch.Size] | None:
    """Return the dtype and shape of an archive's tensor; None if it is not a plain, contiguous one."""
    if description not in known:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        is_plain = is_plain and not (tensor.is_neg() or tensor.is_conj()) and tensor.is_contiguous()
        known[description] = (tensor.dtype, tensor.shape) if is_plain else None
    return known[description]


def load_tensor(content: memoryview, known: Descriptions) -> torch.Tensor:
    """Return the tensor of an archive, in its memory if it is a plain, contiguous one."""
    found = data_range(content)
    kind = None if found is None else described(content, found[2], known)
    if found is None or kind is None or found[1] - found[0] != kind[1].numel() * kind[0].itemsize:
        tensor: torch.Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return tensor
    dtype, shape = kind
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content[found[0] : found[1]], dtype=dtype).view(shape)
