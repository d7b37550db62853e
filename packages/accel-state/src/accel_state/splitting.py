"""Divides inputs between processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from .containers import honor_type, is_namedtuple, rebuild_mapping


def share_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous share of ``length`` items; a remainder goes to the first ranks."""
    base, odd = divmod(length, world_size)
    start = rank * base + min(rank, odd)
    return start, start + base + (rank < odd)


def share_of(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> Any:
    """Return a rank's share of the inputs; see :meth:`ProcessControl.split_between_processes`."""
    length = _common_length(inputs)
    if apply_padding and length == 0 and world_size > 1:
        raise ValueError(
            "split_between_processes cannot pad: the inputs are empty, so there is no last input to repeat."
        )
    start, end = share_bounds(length, rank, world_size)
    longest = -(-length // world_size)
    return _take(inputs, start, end, longest - (end - start) if apply_padding else 0)


def _common_length(inputs: Any) -> int:
    if is_namedtuple(inputs):
        inputs = inputs._asdict()
    if isinstance(inputs, Mapping):
        lengths = {key: _common_length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes needs members of one length, but got {lengths}.")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) or _is_array(inputs):
        if inputs.ndim == 0:
            raise TypeError("split_between_processes cannot split a 0-dimensional tensor. Put it into a list.")
        return int(inputs.shape[0])
    if isinstance(inputs, (str, bytes)) or not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(
            f"split_between_processes cannot split a {type(inputs).__name__}. It accepts lists, tuples, tensors, "
            "arrays, data sets with a length, and dictionaries of those."
        )
    return len(inputs)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # which is optional; without it there are no arrays
    return numpy is not None and isinstance(value, numpy.ndarray)


def _take(inputs: Any, start: int, end: int, padding: int) -> Any:
    """Items ``start`` to ``end``, followed by the last item ``padding`` times."""
    if isinstance(inputs, Mapping):
        return rebuild_mapping(inputs, {key: _take(value, start, end, padding) for key, value in inputs.items()})
    if is_namedtuple(inputs):
        return honor_type(inputs, (_take(value, start, end, padding) for value in inputs))
    if isinstance(inputs, (torch.Tensor, list, tuple)) or _is_array(inputs):
        share: Any = inputs[start:end]
        if isinstance(inputs, torch.Tensor) and padding:
            return torch.cat([share, inputs[-1:].expand(padding, *inputs.shape[1:])])
        if padding and _is_array(inputs):
            return sys.modules["numpy"].concatenate([share, inputs[-1:].repeat(padding, axis=0)])
        return share + inputs[-1:] * padding if padding else share
    indices = [*range(start, end), *[len(inputs) - 1] * padding]
    if hasattr(inputs, "select"):  # a Hugging Face data set, which keeps its type
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if isinstance(inputs, Sequence):
        return [inputs[i] for i in indices]
    raise TypeError(
        f"split_between_processes cannot take single items from a {type(inputs).__name__}. Convert it to a list first."
    )
