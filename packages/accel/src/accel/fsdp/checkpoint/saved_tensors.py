"""Tensors that ``torch.save`` has put into a file one after another, read straight into their place.

torch's own way unpickles each of them, reads its elements into memory of its own, and copies them from there. Most are
much alike: which tensor a description stands for is found out once by ``torch.load``, and the elements of others with
the same description (byte by byte) are read to where they belong. Whatever looks unusual is left to ``torch.load``.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

# The parts of the ZIP format that torch writes: the header of a record, its line in the directory, and where the
# directory is.
_HEADER = struct.Struct("<4s5H3L2H")
_LINE = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_NOT_HERE = 0xFFFFFFFF
_ELEMENTS = "data/0"
# The directory of a tensor takes 600 bytes.
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class Kind:
    """What a description stands for: a tensor whose elements lie in order, and nothing else."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize


class SavedTensors:
    """Reads tensors from one file. A context manager, in whose block the file is open.

    Args:
        path: the file.
        kinds: what descriptions are known to stand for; grows, and may be shared by several files.
    """

    def __init__(self, path: Path, kinds: dict[bytes, Kind]) -> None:
        self._path = path
        self._kinds = kinds

    def __enter__(self) -> SavedTensors:
        self._file = open(self._path, "rb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, offset: int, length: int, begin: torch.Size, target: torch.Tensor) -> None:
        """Read a part of a tensor.

        Args:
            offset: where the tensor begins in the file.
            length: its bytes, with its description.
            begin: where the part begins in it.
            target: where the part goes; of its shape.

        Raises:
            EOFError: the file ends before.
        """
        records = self._records(offset, length)
        description = self._record(records["data.pkl"]) if records else b""
        kind = self._kinds.get(description)
        if kind is not None and records[_ELEMENTS][1] == kind.nbytes:
            self._read_elements(self._begin(records[_ELEMENTS][0]), kind, begin, target)
            return
        whole = torch.load(io.BytesIO(self._bytes(offset, length)), map_location="cpu", weights_only=True)
        if description and _lies_in_order(whole):
            self._kinds[description] = Kind(whole.dtype, whole.shape)
        _copy(whole, begin, target)

    def _read_elements(self, position: int, kind: Kind, begin: torch.Size, target: torch.Tensor) -> None:
        rows = slice(begin[0], begin[0] + target.shape[0]) if kind.shape else slice(0, 1)
        of_all_columns = target.shape[1:] == kind.shape[1:] and not any(begin[1:])
        if not of_all_columns or rows.stop > (kind.shape[0] if kind.shape else 1):
            whole = torch.empty(kind.shape, dtype=kind.dtype)
            self._fill(whole, position)
            _copy(whole, begin, target)
            return
        direct = target.dtype == kind.dtype and target.device.type == "cpu" and target.is_contiguous()
        part = target if direct else torch.empty(target.shape, dtype=kind.dtype)
        row = kind.nbytes // max(kind.shape[0], 1) if kind.shape else kind.nbytes
        self._fill(part, position + rows.start * row)
        if not direct:
            target.copy_(part)

    def _fill(self, tensor: torch.Tensor, position: int) -> None:
        if tensor.numel():
            elements: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            self._read_into(memoryview(elements), position)

    def _bytes(self, position: int, length: int) -> bytearray:
        content = bytearray(length)
        self._read_into(memoryview(content), position)
        return content

    def _read_into(self, memory: memoryview, position: int) -> None:
        done = 0
        self._file.seek(position)
        while done < len(memory):
            count = self._file.readinto(memory[done:])
            if not count:
                raise EOFError(
                    f"the file ends at byte {position + done}, and a tensor goes on to {position + len(memory)}"
                )
            done += count

    def _records(self, offset: int, length: int) -> Mapping[str, tuple[int, int]]:
        """Where in the file the header of each record of a tensor is, and the bytes of the record; none if that is
        unusual.
        """
        begin = max(length - _TAIL_BYTES, 0)
        tail = self._bytes(offset + begin, length - begin)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or at + _END.size > len(tail):
            return {}
        _, _, _, _, count, _, place, _ = _END.unpack_from(tail, at)
        records: dict[str, tuple[int, int]] = {}
        place -= begin
        for _ in range(count):
            if place < 0 or place + _LINE.size > at:
                return {}
            line = _LINE.unpack_from(tail, place)
            mark, method, size, name_bytes, start = line[0], line[4], line[9], line[10], line[16]
            if mark != b"PK\1\2" or method or _NOT_HERE in (size, start):
                return {}
            name = bytes(tail[place + _LINE.size : place + _LINE.size + name_bytes]).decode("utf-8", "replace")
            records[name.partition("/")[2]] = offset + start, size
            place += _LINE.size + name_bytes + line[11] + line[12]
        # Of several memories, or of one in another order of bytes, a description says more than which tensor it is.
        usual = {"data.pkl", "byteorder", _ELEMENTS} <= set(records) and "data/1" not in records
        return records if usual and self._record(records["byteorder"]) == sys.byteorder.encode() else {}

    def _begin(self, header: int) -> int:
        """Where the content of a record begins."""
        fields = _HEADER.unpack_from(self._bytes(header, _HEADER.size))
        return int(header + _HEADER.size + fields[9] + fields[10])

    def _record(self, place: tuple[int, int]) -> bytes:
        return bytes(self._bytes(self._begin(place[0]), place[1]))


def _lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements, one after another."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _copy(whole: torch.Tensor, begin: torch.Size, target: torch.Tensor) -> None:
    part = whole
    for dim, (start, size) in enumerate(zip(begin, target.shape, strict=True)):
        part = part.narrow(dim, start, size)
    target.copy_(part)
