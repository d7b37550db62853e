"""Parameters that are saved in another shape than the one they are held in.

With tensor parallelism a rank has a part of each matrix in a fused parameter (queries, keys and values), which is no
contiguous range of its rows or columns. With an extra dimension for the matrices it is: the parameter is held as a
DTensor of that shape, with its elements in the original order. This module restores the model's own shape in files,
where a rank's part is several ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._torch_compat import make_wrapper_subclass
from .unwrap import clean_name

_SHAPES = "_accel_packed_shapes"


def remember_packed(module: nn.Module, name: str, shape: torch.Size) -> None:
    """Record the shape in which a module's parameter is saved."""
    vars(module).setdefault(_SHAPES, {})[name] = shape


def packed_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the saved shapes of all fused parameters of a model, by name."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): shape
        for prefix, module in model.named_modules()
        for name, shape in vars(module).get(_SHAPES, {}).items()
    }


class Packed(torch.Tensor):
    """A DTensor that is saved in another shape; ``accel_checkpoint.sharded`` finds its parts in ``tensor``."""

    # of a shape in which one dimension of ``shape`` is split in two; the first counts the fused matrices
    tensor: DTensor

    @staticmethod
    def __new__(cls: type[Packed], tensor: DTensor, shape: torch.Size) -> Packed:
        packed: Packed = make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=tensor.device)
        packed.tensor = tensor
        return packed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a packed parameter. Use its `tensor`, or `full_tensor()`.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, {self.tensor!r})"

    def full_tensor(self) -> torch.Tensor:
        gathered: torch.Tensor = full_tensor(self.tensor).reshape(self.shape)
        return gathered


def pack(value: Any, shape: torch.Size | None) -> Any:
    """Return a DTensor as it is saved; other values, and DTensors that have that shape, unchanged."""
    if shape is None or not isinstance(value, DTensor):
        return value
    is_fused = value.ndim == len(shape) + 1 and value.numel() == shape.numel()
    return Packed(value, shape) if is_fused else value


def pack_state(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    """Return a state by name, as it is saved."""
    return {name: pack(value, shapes.get(name)) for name, value in state.items()}


def unpack(value: Any) -> Any:
    """Undo :func:`pack`."""
    return value.tensor if isinstance(value, Packed) else value


def full_tensor(value: Any) -> Any:
    """Return a sharded tensor in full, in the shape in which it is saved; other values unchanged.

    Every rank must call it.
    """
    if isinstance(value, Packed):
        return value.full_tensor()
    if not isinstance(value, DTensor):
        return value
    # Where two axes shard one dimension, gather the one that sharded last first: torch warns if both go at once.
    placements = [placement if isinstance(placement, Shard) else Replicate() for placement in value.placements]
    return value.redistribute(placements=placements).full_tensor()
