"""One process: the null object, and the interface that every other variant fills in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]


class Collectives:
    """Collectives of a world of one process, where each of them is the identity.

    Every method must be called by all ranks, in the same order, with tensors of the same shapes and dtypes.
    """

    rank: int = 0
    world_size: int = 1

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks.

        Returns:
            A tensor of shape ``(world_size, *tensor.shape)``, without gradient.
        """
        return tensor.detach().unsqueeze(0)

    def all_gather_many(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`all_gather` of each tensor, with as few messages as the back end can make of them."""
        return [self.all_gather(tensor) for tensor in tensors]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce over all ranks, in place.

        Returns:
            The given tensor.
        """
        return tensor

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "sum") -> list[torch.Tensor]:
        """:meth:`all_reduce` of each tensor, in place, with as few messages as the back end can make of them."""
        return [self.all_reduce(tensor, op) for tensor in tensors]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Give every rank the values of rank ``source``, in place.

        Returns:
            The given tensor.
        """
        return tensor

    def broadcast_many(self, tensors: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        """:meth:`broadcast` of each tensor, in place, with as few messages as the back end can make of them."""
        return [self.broadcast(tensor, source) for tensor in tensors]

    def all_gather_object(self, obj: T) -> list[T]:
        """The picklable objects of all ranks, in the order of ranks."""
        return [obj]

    def broadcast_object(self, obj: T, source: int = 0) -> T:
        """The picklable object of rank ``source``; what other ranks pass is ignored."""
        return obj

    def scatter_object(self, objects: Sequence[Any] | None, source: int = 0) -> Any:
        """Give rank i the i-th of the picklable objects that rank ``source`` passes; other ranks pass None."""
        if objects is None or len(objects) != 1:
            raise ValueError(f"scatter_object needs one object a rank, so 1; it got {objects!r}")
        return objects[0]

    def shutdown(self) -> None:
        """Leave the group. Nothing may be called afterwards."""
