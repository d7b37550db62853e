"""Gradients through offloaded modules: autograd keeps a note of an offloaded weight, and reads the weight again when it
needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _Note:
    """A view of an offloaded weight."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements behind the weight's first one."""


def without_weights(values: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> Any:
    """A context in which autograd saves no weights, which would keep the whole model in memory until the backward pass.

    Args:
        values: the weights in use, by name.
        read: gives a weight again, on the device where it was.
    """
    ranges = [
        (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size(), name)
        for name, value in values.items()
    ]

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.data_ptr()
        name = next((name for start, stop, name in ranges if start <= address < stop), None)
        if name is None or tensor.dtype != values_of[name]:
            return tensor
        offset = (address - starts[name]) // tensor.element_size()
        return _Note(name, tensor.size(), tensor.stride(), offset)

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Note):
            return packed
        value = read(packed.name)
        return value.as_strided(packed.size, packed.stride, value.storage_offset() + packed.offset)

    starts = {name: start for start, _, name in ranges}
    values_of = {name: value.dtype for name, value in values.items()}
    return saved_tensors_hooks(pack, unpack)
