"""Host memory that another process can map, and states that are sent to it without a copy of their tensors."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ._torch_compat import neg_view

# A segment takes memory only where it was written to, so that a large one costs nothing.
_SEGMENT_BYTES = 1 << 28
_ALIGNMENT = 64

Place = tuple[int, int, int]
"""Where a storage is: its segment, the first byte there, and the number of bytes."""


class Segment:
    """A piece of shared memory.

    Args:
        nbytes: its size.
        descriptor: of the file that it maps; None makes one. It belongs to the segment.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _new_file(nbytes)
        self.nbytes = nbytes
        self.descriptor = descriptor  # -1: other processes cannot map it
        self.memory: mmap.mmap = mmap.mmap(descriptor, nbytes)
        self.begin: int = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a part of it, which keeps all of it alive."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=nbytes).untyped_storage()

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)  # the mapping stays while a storage needs it


def _new_file(nbytes: int) -> int:
    """Return the descriptor of a file in memory; -1 where the system has none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        descriptor = os.memfd_create("accel-checkpoint")
    except OSError:  # forbidden here
        return -1
    os.ftruncate(descriptor, nbytes)
    return descriptor


class SharedMemory:
    """Gives out storages one after the other, at the same places for states of the same sizes.

    Attributes:
        segments: by number.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._used: dict[int, int] = {}  # bytes of each segment that are taken
        self._made = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that storages take."""
        return sum(self._used.values())

    @property
    def can_be_mapped(self) -> bool:
        """True if another process can map all of it."""
        return all(segment.descriptor >= 0 for segment in self.segments.values())

    def start(self) -> None:
        """Begin anew: storages that were given out before may be overwritten."""
        self._used = dict.fromkeys(self.segments, 0)

    def finish(self) -> None:
        """Release the segments of which nothing was needed."""
        for number in [number for number, used in self._used.items() if not used]:
            del self.segments[number], self._used[number]

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory with any contents."""
        if not nbytes:
            return torch.UntypedStorage(0)
        taken = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for number, segment in self.segments.items():
            if self._used[number] + taken <= segment.nbytes:
                break
        else:
            number, self._made = self._made, self._made + 1
            segment = self.segments[number] = Segment(max(taken, _SEGMENT_BYTES, self.used_bytes))
            self._used[number] = 0
        begin = self._used[number]
        self._used[number] += taken
        return segment.storage(begin, nbytes)

    def places(self) -> Callable[[torch.UntypedStorage], Place | None]:
        """Return what finds the place of a storage; None of one that is elsewhere."""
        begins = sorted((segment.begin, number) for number, segment in self.segments.items())

        def place(storage: torch.UntypedStorage) -> Place | None:
            address, nbytes = storage.data_ptr(), storage.nbytes()
            index = bisect_right(begins, (address, self._made)) - 1
            if index < 0 or not nbytes:
                return None
            begin, number = begins[index]
            if address + nbytes > begin + self.segments[number].nbytes:
                return None
            return number, address - begin, nbytes

        return place


def dumps(value: Any, memory: SharedMemory) -> bytes:
    """Pickle a value; of tensors in the memory only their places."""
    content = io.BytesIO()
    _Pickler(content, memory).dump(value)
    return content.getvalue()


def loads(content: bytes, segments: Mapping[int, Segment]) -> Any:
    """Return the value that :func:`dumps` has pickled, whose tensors are in the memory of the segments."""
    return _Unpickler(io.BytesIO(content), segments).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: SharedMemory) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._place = memory.places()

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu" or not is_plain(obj):
            return NotImplemented
        place = self._place(obj.untyped_storage())
        return NotImplemented if place is None else (tensor_in, (_Shared(place), *view_of(obj)))


class _Shared:
    """A storage in shared memory, which is sent as its place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return _storage_at, self.place


class _Unpickler(pickle.Unpickler):
    """Reads what the process that started this one has sent."""

    def __init__(self, file: io.BytesIO, segments: Mapping[int, Segment]) -> None:
        super().__init__(file)
        self._segments = segments
        # Tensors that shared a storage share one again.
        self._storages: dict[Place, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_storage_at.__module__, _storage_at.__name__):
            return self._storage
        return super().find_class(module, name)

    def _storage(self, number: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        place = number, offset, nbytes
        if place not in self._storages:
            self._storages[place] = self._segments[number].storage(offset, nbytes)
        return self._storages[place]


def _storage_at(number: int, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Stands for the storage at a place; an unpickler replaces it by a method that knows the segments."""
    raise pickle.UnpicklingError(f"bytes {offset} to {offset + nbytes} of segment {number} are in another process")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is defined by a storage, offset, size and strides; others copy themselves."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type != "meta" and not vars(tensor)


def view_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """Return what a plain tensor is besides its storage, for :func:`tensor_in`."""
    flags = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, isinstance(tensor, nn.Parameter)
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()), flags


def tensor_in(storage: torch.UntypedStorage, view: tuple[Any, ...], flags: tuple[bool, ...]) -> torch.Tensor:
    """Return the tensor in a storage that looks like the one that :func:`view_of` has described."""
    dtype, *place = view
    is_conjugate, is_negative, requires_grad, is_parameter = flags
    tensor = torch.empty(0, dtype=dtype).set_(storage, *place)
    # Conjugation and negation are flags of the tensor; the memory holds the values before them.
    tensor = tensor.conj() if is_conjugate else tensor
    tensor = neg_view(tensor) if is_negative else tensor
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
