"""Counting, slicing and joining the samples of batches, whatever structure the collate function produces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accel_state.operations.nested import leaves, map_children


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_sample_list(value: Any) -> bool:
    """Whether this is a list of samples (strings, dictionaries, ...) rather than a structure that contains arrays."""
    return isinstance(value, list) and not leaves(value, _is_array)


def count_samples(batch: Any) -> int | None:
    """Length of the batch's first array that has a dimension; without arrays, that of its first list, if any."""
    for array in leaves(batch, _is_array):
        if array.ndim:
            return int(array.shape[0])
    return _first_list_length(batch)


def _first_list_length(batch: Any) -> int | None:
    if isinstance(batch, list):
        return len(batch)
    if not isinstance(batch, Mapping | tuple):
        return None
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((length for length in map(_first_list_length, values) if length is not None), None)


def slice_batch(batch: Any, first: int, last: int) -> Any:
    """Samples [first, last) of a batch; values without one entry per sample are kept as they are."""
    size = count_samples(batch)

    def visit(value: Any) -> Any:
        if _is_array(value):
            return value[first:last] if value.ndim and value.shape[0] == size else value
        if _is_sample_list(value) and len(value) == size:
            return value[first:last]
        children = map_children(visit, value)
        return value if children is NotImplemented else children

    return visit(batch)


def concat_batches(batches: Sequence[Any]) -> Any:
    """One batch of the samples of several; values without one entry per sample are taken from the first batch."""
    if len(batches) == 1:
        return batches[0]
    return _concat(batches, [count_samples(batch) for batch in batches])


def _concat(values: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError(
            f"batches of different structures cannot be joined: {sorted({type(value).__name__ for value in values})}"
        )
    if _is_array(first):
        return _concat_arrays(values, sizes)
    if _is_sample_list(first) and [len(value) for value in values] == list(sizes):
        return [sample for value in values for sample in value]
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError(f"batches with different keys cannot be joined: {[list(value) for value in values]}")
        values = [{key: value[key] for key in first} for value in values]  # whatever order each collate function made
    # map_children visits the children of the first value in the same order as _children does.
    counterparts = iter(list(zip(*(_children(value) for value in values), strict=True)))
    joined = map_children(lambda _: _concat(next(counterparts), sizes), first)
    return first if joined is NotImplemented else joined


def _children(value: Any) -> list[Any]:
    children: list[Any] = []
    map_children(children.append, value)
    return children


def _concat_arrays(arrays: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    if any(array.ndim == 0 or array.shape[0] != size for array, size in zip(arrays, sizes, strict=True)):
        return arrays[0]
    if len({tuple(array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(
            f"arrays of shapes {[tuple(array.shape) for array in arrays]} cannot be joined along their first dimension"
        )
    return torch.cat(list(arrays)) if isinstance(arrays[0], torch.Tensor) else np.concatenate(arrays)
