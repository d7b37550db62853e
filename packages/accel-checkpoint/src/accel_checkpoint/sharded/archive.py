"""Looks into what ``torch.save`` has written for one tensor, without unpickling or copying it."""

from __future__ import annotations

import io
import struct
import sys
import zipfile

import torch

# What the directory at the end of an archive of one tensor fits in, and what is in front of its data.
TAIL_BYTES = 2048
HEAD_BYTES = 2048

Descriptions = dict[bytes, "tuple[torch.dtype, torch.Size] | None"]
"""What is known of tensors by their pickled description; None of those that are not plain."""


def data_range(content: memoryview) -> tuple[int, int, bytes] | None:
    """Where the data of an archive of one tensor begins and ends, and its description; None for anything else.

    Only the first and the last bytes are looked at (:data:`HEAD_BYTES`, :data:`TAIL_BYTES`).
    """
    tail = content[-TAIL_BYTES:]
    try:
        # The directory of the archive is at its end; header_offset is relative to what zipfile is given.
        infos = zipfile.ZipFile(io.BytesIO(tail)).infolist()
    except zipfile.BadZipFile:
        return None
    places: dict[str, tuple[int, int]] = {}
    for info in infos:
        header = info.header_offset + len(content) - len(tail)
        name = info.filename.partition("/")[2]
        if name not in ("data.pkl", "byteorder", "data/0"):
            if name == "data/1":
                return None
            continue
        name_length, extra_length = struct.unpack_from("<HH", content, header + 26)
        begin = header + 30 + name_length + extra_length
        places[name] = begin, begin + info.file_size
        if info.compress_type != zipfile.ZIP_STORED:
            return None
    if set(places) != {"data.pkl", "byteorder", "data/0"}:
        return None
    if bytes(content[slice(*places["byteorder"])]) != sys.byteorder.encode():
        return None
    return (*places["data/0"], bytes(content[slice(*places["data.pkl"])]))


def described(content: memoryview, description: bytes, known: Descriptions) -> tuple[torch.dtype, torch.Size] | None:
    """The dtype and shape of an archive's tensor; None if it is not a plain, contiguous one."""
    if description not in known:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        is_plain = is_plain and not (tensor.is_neg() or tensor.is_conj()) and tensor.is_contiguous()
        known[description] = (tensor.dtype, tensor.shape) if is_plain else None
    return known[description]


def map_tensor(content: memoryview, known: Descriptions) -> torch.Tensor | None:
    """A tensor that shares the memory of an archive; None for anything but a contiguous tensor."""
    found = data_range(content)
    if found is None:
        return None
    begin, end, description = found
    kind = described(content, description, known)
    if kind is None or end - begin != kind[1].numel() * kind[0].itemsize:
        return None
    dtype, shape = kind
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content[begin:end], dtype=dtype).view(shape)


def load_tensor(content: memoryview, known: Descriptions) -> torch.Tensor:
    """The tensor of an archive, in its memory where that is possible."""
    tensor = map_tensor(content, known)
    if tensor is None:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return tensor
