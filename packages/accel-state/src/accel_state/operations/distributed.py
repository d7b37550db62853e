"""Collectives over nested data."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from ..arguments import check_number
from ..collectives.single import Collectives
from ..errors import ConfigurationError
from ..state import PartialState
from .input_checks import check_inputs
from .nested import (
    check_no_numbers,
    check_only_tensors,
    check_reachable,
    get_data_structure,
    initialize_tensors,
    leaves,
    replace_leaves,
)

Reduction = Literal["mean", "sum", "max", "min", "none"]
T = TypeVar("T")


def gather(tensor: T, *, collectives: Collectives | None = None) -> T:
    """Concatenate the tensors of all ranks along the first dimension.

    Args:
        tensor: nested data; every tensor has the same shape and dtype on all ranks.
        collectives: those of the participating ranks; None for all ranks.

    Returns:
        Data of the same structure on every rank. A tensor of shape ``(n, ...)`` becomes ``(world_size * n, ...)`` in
        rank order, a 0-dimensional one becomes ``(world_size,)``. Subclasses of tensors are kept, as operations on
        them keep them. A single process returns the data unchanged.

    Raises:
        TypeError: the data contains leaves other than tensors, or a container that cannot be built with new values.
        DistributedOperationException: the inputs of the ranks differ (in debug mode checked in every call).
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    check_only_tensors(tensor, "gather")
    check_reachable(tensor, "gather")
    collectives = collectives or state.collectives
    check_inputs("accel_state.operations.gather", tensor, collectives)
    own = leaves(tensor)
    gathered = collectives.all_gather_many(own)
    joined = (value if value.ndim == 1 else value.flatten(0, 1) for value in gathered)
    return replace_leaves(tensor, (_like(leaf, value) for leaf, value in zip(own, joined, strict=True)))


def _like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` with the type that operations on ``original`` return."""
    original = original.detach()  # a Parameter becomes a tensor
    if type(original) is torch.Tensor or type(value) is type(original):
        return value
    return original.new_empty(value.shape).copy_(value)


def gather_object(object: Any, *, collectives: Collectives | None = None) -> list[Any]:
    """Collect picklable objects from all ranks.

    Args:
        object: a list (or tuple) of objects, or a single object. A tensor counts as the list of its rows; a single
            process gets it back as it is.
        collectives: those of the participating ranks; None for all ranks.

    Returns:
        On every rank, one list in rank order: the members of all lists, or each rank's single object.
    """
    collectives = collectives or PartialState().collectives
    if isinstance(object, torch.Tensor) and object.ndim:
        if collectives.world_size == 1:
            return object  # type: ignore[return-value]  # callers concatenate tensors over steps
        object = list(object)
    gathered = collectives.all_gather_object(object)
    if all(isinstance(item, (list, tuple)) for item in gathered):
        return [member for item in gathered for member in item]
    return gathered


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Copy the tensors of one rank to all ranks.

    Args:
        tensor: nested data; every tensor has the same shape and dtype on all ranks. It is overwritten in place.
        from_process: the source rank.

    Returns:
        The given data.

    Raises:
        ValueError: the rank does not exist.
        TypeError: a tensor is not dense, or in a collection of another type, such as a deque; the data has numbers or
            arrays, which would stay as they are.
        DistributedOperationException: the inputs of the ranks differ (in debug mode checked in every call).
    """
    state = PartialState()
    _check_rank(from_process, state.num_processes)
    check_reachable(tensor, "broadcast")
    check_no_numbers(tensor, "broadcast")
    check_inputs("accel_state.operations.broadcast", tensor, state.collectives, f"from_process={from_process}")
    state.collectives.broadcast_many(leaves(tensor), from_process)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy the picklable objects of one rank to all ranks.

    Args:
        object_list: a list of the same length on every rank; it is overwritten in place.
        from_process: the source rank.

    Returns:
        The given list.

    Raises:
        ValueError: the rank does not exist, or the lengths differ.
    """
    state = PartialState()
    _check_rank(from_process, state.num_processes)
    received = state.collectives.broadcast_object(object_list, from_process)
    if len(received) != len(object_list):
        raise ValueError(
            f"broadcast_object_list got a list of {len(object_list)} on rank {state.process_index} and of "
            f"{len(received)} on rank {from_process}. Pass a list of that length, for example [None] * {len(received)}."
        )
    object_list[:] = received
    return object_list


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"from_process={rank} is not a rank of this run. Allowed: 0 to {world_size - 1}.")


def reduce(
    tensor: T, reduction: Reduction = "mean", scale: float = 1.0, *, collectives: Collectives | None = None
) -> T:
    """Reduce the tensors of all ranks element-wise.

    Args:
        tensor: nested data; every tensor has the same shape and dtype on all ranks. It is not modified.
        reduction: "mean", "sum", "max", "min", or "none" to keep each rank's values.
        scale: factor of the result.
        collectives: those of the participating ranks; None for all ranks.

    Returns:
        Data of the same structure, equal on every rank. A mean of integers is float32, a sum of them int64. Means
        and sums can be backpropagated through, on every rank alike: the gradient of a tensor is that of the results of
        all ranks together, so that with gradients averaged over the ranks, as DDP does, it is that of one process.
        "none" passes gradients on, and "max" and "min" have none.

    Raises:
        ConfigurationError: the reduction is unknown, or ``scale`` is not a finite number.
        TypeError: a tensor is not dense, or in a collection of another type, such as a deque; the data has numbers or
            arrays, which would stay as they are.
        DistributedOperationException: the inputs of the ranks differ (in debug mode checked in every call).
    """
    if reduction not in ("mean", "sum", "max", "min", "none"):
        raise ConfigurationError(f"reduction={reduction!r} is not one of mean, sum, max, min, none.")
    if not isinstance(scale, torch.Tensor):  # whose value may be on a device
        scale = check_number("scale", scale)
    check_reachable(tensor, "reduce")
    collectives = collectives or PartialState().collectives
    if reduction != "none":
        check_no_numbers(tensor, "reduce")
        check_inputs("accel_state.operations.reduce", tensor, collectives, f"reduction={reduction!r}")
    values = [_reducible(leaf, reduction) for leaf in leaves(tensor)]
    if reduction != "none":
        collectives.all_reduce_many(values, "sum" if reduction == "mean" else reduction)
    factor = scale / collectives.world_size if reduction == "mean" else scale
    if reduction in ("max", "min"):
        return replace_leaves(tensor, (value if factor == 1 else value * factor for value in values))
    # "none" has no sum over ranks: its backward is that of one process.
    ranks = Collectives() if reduction == "none" else collectives
    pairs = zip(leaves(tensor), values, strict=True)
    return replace_leaves(tensor, (_scaled(leaf, value, factor, ranks) for leaf, value in pairs))


def _scaled(tensor: torch.Tensor, value: torch.Tensor, factor: float, collectives: Collectives) -> torch.Tensor:
    """``value * factor``, connected to the ``tensor`` that it was reduced from if that needs gradients."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return cast(torch.Tensor, _Sum.apply(tensor, value, factor, collectives))
    return value if factor == 1 else value * factor


class _Sum(torch.autograd.Function):
    """A sum over ranks that was computed already.

    Every rank's input is part of every rank's result, so its gradient is the sum over ranks of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, _tensor: torch.Tensor, value: torch.Tensor, factor: float, collectives: Collectives
    ) -> torch.Tensor:
        ctx.factor, ctx.collectives = factor, collectives
        return value * factor  # a new tensor: torch forbids in-place changes of an input that is returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = gradient.clone()  # of an expanded one, every element
        ctx.collectives.all_reduce(total, "sum")
        return total * ctx.factor, None, None, None


def _reducible(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if reduction == "mean" and is_whole:
        return tensor.float()
    # As torch.sum: a sum of small integers, such as counts in uint8, would wrap around.
    if (reduction == "sum" and is_whole) or (reduction in ("max", "min") and tensor.dtype == torch.bool):
        return tensor.to(torch.int64, copy=True)
    return tensor.detach().clone()


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor that only one rank has to all ranks.

    Args:
        tensor: the tensor on one rank, None on all others. If several ranks pass one, the lowest rank's is copied.

    Raises:
        ValueError: no rank has a tensor.
    """
    collectives = PartialState().collectives
    structures = collectives.all_gather_object(None if tensor is None else get_data_structure(tensor))
    source = next((rank for rank, structure in enumerate(structures) if structure is not None), None)
    if source is None:
        raise ValueError("copy_tensor_to_devices got None on every rank; one of them must pass a tensor.")
    if tensor is None or collectives.rank != source:
        tensor = initialize_tensors(structures[source]).to(PartialState().device)
    return collectives.broadcast(tensor, source)


def gather_tensor_shape(tensor: torch.Tensor | None) -> torch.Size:
    """Return the shape of a tensor that only one rank has; all others pass None.

    Raises:
        ValueError: no rank has a tensor.
    """
    shapes = PartialState().collectives.all_gather_object(None if tensor is None else tensor.shape)
    for shape in shapes:
        if shape is not None:
            return shape
    raise ValueError("gather_tensor_shape got None on every rank; one of them must pass a tensor.")
