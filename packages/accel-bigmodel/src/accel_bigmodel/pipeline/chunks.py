"""Cutting a batch into the chunks that follow each other through a pipeline, and putting the results together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.operations import recursively_apply
from accel_state.operations.nested import leaves, replace_leaves


def split(data: Any, batch_size: int, count: int) -> list[Any]:
    """Cut every tensor with ``batch_size`` samples along its first dimension into ``count`` pieces of one size.

    Args:
        data: nested data. Tensors of another length go whole to every chunk.
        batch_size: number of samples, a multiple of ``count``.
        count: number of chunks.
    """
    size = batch_size // count

    def piece(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.narrow(0, number * size, size) if tensor.ndim and tensor.shape[0] == batch_size else tensor

    return [recursively_apply(piece, data, number) for number in range(count)]


def merge(outputs: Sequence[Any], size: int) -> Any:
    """Put the outputs of the chunks together.

    Args:
        outputs: nested data, of one structure.
        size: samples in a chunk: tensors of this length are joined along their first dimension.

    Raises:
        ConfigurationError: the first dimension of a tensor is not that of the samples, and it differs from chunk to
            chunk.
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
        f"the model returns a tensor of shape {tuple(first.shape)} whose first dimension is not the {size} samples of "
        "a chunk, "
        f"and which differs from chunk to chunk (a loss or a state, for example), so the {len(tensors)} chunks cannot "
        "be put together. "
        "Call the model without labels, or prepare it with num_chunks=1."
    )


def take(data: Any, padded: int, batch_size: int) -> Any:
    """Drop the samples that were added to fill the last chunk: the first ``batch_size`` of tensors with ``padded``
    samples.
    """
    if padded == batch_size:
        return data
    return recursively_apply(
        lambda tensor: tensor[:batch_size] if tensor.ndim and tensor.shape[0] == padded else tensor, data
    )
