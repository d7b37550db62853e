"""Gradients through offloaded modules: autograd saves references to offloaded weights and rereads them in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _WeightView:
    """A view of an offloaded weight; ``offset`` counts elements from the weight's first one."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def without_weights(values: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> Any:
    """A context in which autograd does not save the weights, which would keep the whole model until the backward."""
    ranges = [(value.data_ptr(), value.data_ptr() + value.nbytes, name) for name, value in values.items()]
    dtypes = {name: value.dtype for name, value in values.items()}

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.data_ptr()
        start, name = next(((start, name) for start, stop, name in ranges if start <= address < stop), (0, None))
        if name is None or tensor.dtype != dtypes[name]:
            return tensor
        return _WeightView(name, tensor.size(), tensor.stride(), (address - start) // tensor.element_size())

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _WeightView):
            return packed
        value = read(packed.name)
        return value.as_strided(packed.size, packed.stride, value.storage_offset() + packed.offset)

    return saved_tensors_hooks(pack, unpack)
