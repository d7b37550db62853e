"""The null object for a single process, and the interface of every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch

from ..errors import DistributedOperationException
from .header import WIDTH, Call, Schedule, explain_mismatch

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]


class Collectives:
    """Collectives of a single process, where each is the identity.

    All ranks must call the same methods in the same order, with tensors of the same shapes and dtypes.
    """

    rank: int = 0
    world_size: int = 1
    schedule: Schedule | None = None
    """Which calls exchange a header; None if they only do in debug mode."""

    def over(self, group: Any) -> Collectives:
        """Return collectives of the same kind over a process group with a part of the processes.

        Raises:
            NotImplementedError: these collectives know no process groups.
        """
        raise NotImplementedError(f"{type(self).__name__} has no collectives over a part of the processes.")

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""

    def all_gather(self, tensor: torch.Tensor, operation: str = "all_gather") -> torch.Tensor:
        """Gather the tensors of all ranks into one of shape ``(world_size, *tensor.shape)``, without gradient.

        ``operation`` is the name in the error of a gather that does not complete.
        """
        return tensor.detach().unsqueeze(0)

    def all_gather_many(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`all_gather` of each tensor, in as few messages as the backend allows."""
        return [self.all_gather(tensor) for tensor in tensors]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce over all ranks in place, and return the tensor."""
        return tensor

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "sum") -> list[torch.Tensor]:
        """:meth:`all_reduce` of each tensor, in place, in as few messages as the backend allows."""
        return [self.all_reduce(tensor, op) for tensor in tensors]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy the values of rank ``source`` to all ranks in place, and return the tensor."""
        return tensor

    def broadcast_many(self, tensors: Sequence[torch.Tensor], source: int = 0) -> list[torch.Tensor]:
        """:meth:`broadcast` of each tensor, in place, in as few messages as the backend allows."""
        return [self.broadcast(tensor, source) for tensor in tensors]

    def scatter(self, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, source: int = 0) -> torch.Tensor:
        """Copy the i-th part that rank ``source`` passes into rank i's tensor, and return the tensor.

        Args:
            tensor: has the shape and dtype of every part, on all ranks.
            parts: one for each rank; None on the other ranks.
        """
        # A broadcast of which each rank keeps its part, because not every backend implements scatter.
        rows = tensor.new_empty((self.world_size, *tensor.shape)) if parts is None else torch.stack(list(parts))
        return tensor.copy_(self.broadcast(rows, source)[self.rank])

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Send the i-th of ``world_size`` equal parts of a flat tensor to rank i; returns the parts received, joined.

        Args:
            tensor: a contiguous tensor of one dimension.
            sizes: the number of elements that each rank sends to this one.
        """
        return tensor

    def exchange(self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to other ranks, and receive some from them in place.

        Args:
            sent: contiguous tensors, each with the rank that it is for.
            received: where to receive, each with the rank that sends it. What two ranks send each other arrives in the
                order of these lists.
        """
        if sent or received:
            raise ValueError(
                f"there are no other ranks, but {len(sent)} tensors to send and {len(received)} to receive"
            )

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the picklable objects of all ranks, in rank order."""
        return [obj]

    def gather_object(self, obj: T, target: int = 0) -> list[T] | None:
        """Return the picklable objects of all ranks, in rank order, on rank ``target``; None on the others."""
        found = self.all_gather_object(obj)
        return found if self.rank == target else None

    def broadcast_object(self, obj: T, source: int = 0) -> T:
        """Return the picklable object of rank ``source``; the arguments of other ranks are ignored."""
        return obj

    def scatter_object(self, objects: Sequence[Any] | None, source: int = 0) -> Any:
        """Send the i-th picklable object of rank ``source`` to rank i; other ranks pass None."""
        if self.rank == source and (objects is None or len(objects) != self.world_size):
            raise ValueError(f"scatter_object needs one object per rank ({self.world_size}), not {objects!r}")
        # A broadcast of which each rank keeps its part, because not every backend implements scatter.
        return self.broadcast_object(objects or (), source)[self.rank]

    def exchange_header(self, call: Call, values: Sequence[int] = ()) -> list[list[int]]:
        """Check that all ranks make the same call; returns the integers that each rank sent along.

        Args:
            call: the operation, and what of its inputs must be equal.
            values: integers; as many on every rank that makes the same call.

        Raises:
            DistributedOperationException: the calls differ; the message has each rank's.
        """
        fits = len(values) < WIDTH
        header = torch.zeros(WIDTH, dtype=torch.int64)
        header[: 1 + len(values) * fits] = torch.tensor([call.digest, *(values if fits else ())])
        rows = self.all_gather(header, call.operation).tolist()
        self.compare_calls(call, [row[0] for row in rows])
        if fits:
            return [row[1 : 1 + len(values)] for row in rows]
        remaining: list[list[int]] = self.all_gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return remaining

    def compare_calls(self, call: Call, digests: Sequence[int]) -> None:
        """Compare the digests of every rank's call.

        Raises:
            DistributedOperationException: they differ; the message has each rank's call.
        """
        if any(digest != call.digest for digest in digests):
            raise DistributedOperationException(explain_mismatch(self._gather_reports(call.report())))

    def _gather_reports(self, report: T) -> list[T]:
        return self.all_gather_object(report)

    def shutdown(self) -> None:
        """Leave the process group. No method may be called afterwards."""
