"""Splitting a batch into micro-batches and merging their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply
from accel_state.operations.nested import leaves, replace_leaves


def batch_size_of(data: Any) -> int | None:
    """Return the first dimension of the first tensor in nested data that has one, or None."""
    return next((int(tensor.shape[0]) for tensor in leaves(data) if tensor.ndim), None)


def split(
    data: Any,
    batch_size: int,
    count: int,
    narrow: Callable[[torch.Tensor, int, int], torch.Tensor] = lambda tensor, start, size: tensor.narrow(
        0, start, size
    ),
) -> list[Any]:
    """Split every tensor with ``batch_size`` samples along its first dimension into ``count`` equal pieces.

    Args:
        data: nested data. Tensors with another first dimension are passed to every micro-batch as they are.
        batch_size: number of samples, a multiple of ``count``.
        count: number of micro-batches.
        narrow: called as ``narrow(tensor, start, size)`` for a piece of ``size`` samples.
    """
    size = batch_size // count

    def piece(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return narrow(tensor, number * size, size) if tensor.ndim and tensor.shape[0] == batch_size else tensor

    return [recursively_apply(piece, data, number) for number in range(count)]


def merge(outputs: Sequence[Any], size: int) -> Any:
    """Merge the outputs of micro-batches of ``size`` samples: tensors of that length are concatenated along dim 0.

    Raises:
        ConfigurationError: a tensor does not start with the batch dimension and differs between micro-batches.
    """
    if len(outputs) == 1:
        return outputs[0]
    pieces = zip(*(leaves(output) for output in outputs), strict=True)
    return replace_leaves(outputs[0], [_join(tensors, size) for tensors in pieces])


def _join(tensors: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    first = tensors[0]
    if first.ndim and first.shape[0] == size:
        return torch.cat(list(tensors))
    if all(tensor.shape == first.shape and torch.equal(tensor, first) for tensor in tensors[1:]):
        return first
    raise ConfigurationError(
        f"the model returns a tensor of shape {tuple(first.shape)}. Its first dimension is not the {size} samples of a "
        f"micro-batch, and it differs between the {len(tensors)} micro-batches (a loss or a state, for example), so "
        "their outputs cannot be merged. Call the model without labels, or prepare it with num_chunks=1."
    )


def drop_padding(data: Any, padded: int, batch_size: int) -> Any:
    """Keep the first ``batch_size`` samples of every tensor with ``padded`` samples."""
    if padded == batch_size:
        return data
    return recursively_apply(
        lambda tensor: tensor[:batch_size] if tensor.ndim and tensor.shape[0] == padded else tensor, data
    )
