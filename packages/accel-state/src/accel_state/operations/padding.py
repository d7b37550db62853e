"""Pads tensors of different lengths to the same length, so that they can be gathered."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch

from ..arguments import check_flag, check_number
from ..errors import ConfigurationError
from ..state import PartialState
from .input_checks import chained_operation, exchange_lengths
from .nested import is_container, is_torch_tensor, leaves, recursively_apply, replace_leaves

T = TypeVar("T")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor of torch, which has no single length to pad to, is returned unchanged."""


@chained_operation
def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Pad the tensors of each rank to the longest one along a dimension.

    Args:
        tensor: nested data; tensors may differ between ranks in the length of ``dim`` only.
        dim: the dimension to pad; tensors without it are returned unchanged. Negative ones count from the end.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.

    Returns:
        Data of the same structure, with tensors of equal shapes on all ranks. Other leaves are returned unchanged, with
        a warning.

    Raises:
        DistributedOperationException: the ranks pass other structures or numbers of dimensions.
        ConfigurationError: a tensor that some rank has to pad cannot have the value ``pad_index``.
    """
    dim = int(check_number("dim", dim, whole=True))
    check_number("pad_index", pad_index, infinite=True)
    check_flag("pad_first", pad_first)
    state = PartialState()
    other_types = {type(leaf).__name__ for leaf in leaves(tensor, _is_other_leaf)}
    if other_types:
        warnings.warn(
            f"pad_across_processes returns values of type {', '.join(sorted(other_types))} unchanged", stacklevel=3
        )
    if not state.use_distributed:
        return tensor
    tensors = leaves(tensor)
    if any(leaf.is_nested for leaf in tensors):
        warnings.warn(
            "pad_across_processes returns nested tensors unchanged", CannotPadNestedTensorWarning, stacklevel=3
        )
    lengths = [leaf.shape[dim] if _has_length(leaf, dim) else 0 for leaf in tensors]
    table = exchange_lengths("accel_state.operations.pad_across_processes", tensor, lengths, state.collectives)
    for leaf, *sizes in zip(tensors, *table, strict=True):
        if min(sizes) < max(sizes):
            _check_value(pad_index, leaf.dtype)
    padded = (_pad(leaf, dim, max(sizes), pad_index, pad_first) for leaf, *sizes in zip(tensors, *table, strict=True))
    return replace_leaves(tensor, padded)


def _is_other_leaf(item: Any) -> bool:
    return not is_torch_tensor(item) and not is_container(item)


def _has_length(tensor: torch.Tensor, dim: int) -> bool:
    return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim


def _check_value(value: float, dtype: torch.dtype) -> None:
    """Raise ConfigurationError if a dtype of integers or bools would change the value."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    bounds = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not bounds[0] <= value <= bounds[1] or value != int(value):
        raise ConfigurationError(
            f"pad_index={value} is not a value of {dtype}, which has the integers from {bounds[0]} to {bounds[1]}. "
            "Choose another pad_index, or convert the tensor first, for example by .long()."
        )


def _pad(tensor: torch.Tensor, dim: int, size: int, value: int, first: bool) -> torch.Tensor:
    if not _has_length(tensor, dim) or tensor.shape[dim] == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, value)
    length = tensor.shape[dim]
    padded.narrow(dim, size - length if first else 0, length).copy_(tensor)
    return padded


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Pad a batch to a multiple of the number of processes, by repeating its last sample.

    Args:
        tensor: nested data.
        batch_size: number of samples; tensors of another length along ``dim`` are returned unchanged.
        num_processes: the padded length is a multiple of it.
        dim: the sample dimension.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim <= dim or leaf.shape[dim] != batch_size or not missing:
            return leaf
        last = leaf.narrow(dim, batch_size - 1, 1)
        return torch.cat([leaf, last.expand(*(missing if i == dim else -1 for i in range(leaf.ndim)))], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)
