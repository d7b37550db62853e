"""Parameters that are held in another shape than the one they are saved in.

Of a matrix that holds several side by side (fused queries, keys and values) a rank has a part of each, which is no
range of its rows or columns. With a dimension of its own for the pieces it is one: the parameter is a DTensor of that
shape, with its elements in the order they always had. Here is what gives it back the model's own shape in files, where
a rank's part is several ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...core.unwrap import clean_name
from ..grad_norm import local

_MARK = "_accel_packed_shapes"


def remember_packed(module: nn.Module, name: str, shape: torch.Size) -> None:
    """Note the shape in which a module's parameter is saved."""
    vars(module).setdefault(_MARK, {})[name] = shape


def packed_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of all such parameters of a model, by their names."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): shape
        for prefix, module in model.named_modules()
        for name, shape in vars(module).get(_MARK, {}).items()
    }


class Packed(torch.Tensor):
    """A DTensor that is saved in another shape, in the words of ``torch.distributed.checkpoint``, which takes tensors
    only.

    Args:
        tensor: of a shape in which one dimension of the other is two, the first of them that of the pieces.
        shape: the shape in which it is saved.
    """

    tensor: DTensor

    @staticmethod
    def __new__(cls: type[Packed], tensor: DTensor, shape: torch.Size) -> Packed:
        own: Packed = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=tensor.device)
        own.tensor = tensor
        return own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func} of a parameter in the form in which it is saved. Take its `tensor`, or `full_tensor()`."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, {self.tensor!r})"

    @property
    def _dim(self) -> int:
        """The dimension of the pieces, in the shape in which it is held."""
        return next(
            dim for dim in range(self.ndim) if self.tensor.shape[: dim + 2].numel() == self.shape[: dim + 1].numel()
        )

    def full_tensor(self) -> torch.Tensor:
        """The whole, in the shape in which it is saved. Every rank must call it."""
        gathered: torch.Tensor = whole(self.tensor).reshape(self.shape)
        return gathered

    def _parts(self) -> list[tuple[torch.Size, torch.Tensor]]:
        """This rank's part of each piece, with where it begins in the whole."""
        own = local(self.tensor.detach())
        _, begin = compute_local_shape_and_global_offset(
            self.tensor.shape, self.tensor.device_mesh, self.tensor.placements
        )
        dim, width = self._dim, self.tensor.shape[self._dim + 1]
        parts = []
        for index in range(own.shape[dim]):
            place = (begin[dim] + index) * width + begin[dim + 1]
            parts.append((torch.Size((*begin[:dim], place, *begin[dim + 2 :])), own.select(dim, index)))
        return [(offset, part) for offset, part in parts if part.numel()]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, part.shape),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.shape,
                ),
            )
            for offset, part in self._parts()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.shape) for offset, part in self._parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for offset, part in self._parts() if offset == index.offset)


def pack(value: Any, shape: torch.Size | None) -> Any:
    """A DTensor as it is saved; other values, and DTensors that have that shape, as they are."""
    held_otherwise = (
        shape is not None
        and isinstance(value, DTensor)
        and value.ndim == len(shape) + 1
        and value.numel() == shape.numel()
    )
    return Packed(value, shape) if held_otherwise else value  # type: ignore[arg-type]


def pack_state(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    """A state by names, as it is saved."""
    return {name: pack(value, shapes.get(name)) for name, value in state.items()}


def whole(value: Any) -> Any:
    """A divided tensor as a whole, in the shape in which it is saved; other values as they are. Every rank must call
    it.
    """
    if isinstance(value, Packed):
        return value.full_tensor()
    if not isinstance(value, DTensor):
        return value
    # Of two axes that divide one dimension, the one that divided last is gathered first: in one go torch warns that it
    # takes two.
    placements = [placement if isinstance(placement, Shard) else Replicate() for placement in value.placements]
    return value.redistribute(placements=placements).full_tensor()


def unpack(value: Any) -> Any:
    """The opposite of :func:`pack`."""
    return value.tensor if isinstance(value, Packed) else value
