"""Rows of a batch: counting, slicing and joining samples in tensors, lists and whatever else a collate function makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accel_state.operations.nested import leaves, map_children


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_sample_list(value: Any) -> bool:
    """Whether this is a list of samples (strings, dictionaries, ...), rather than a structure that holds arrays."""
    return isinstance(value, list) and not leaves(value, _is_array)


def count_rows(batch: Any) -> int | None:
    """Samples in a batch: the length of its first array that has a dimension, or of its first list without arrays; None
    without either.
    """
    for array in leaves(batch, _is_array):
        if array.ndim:
            return int(array.shape[0])
    return _first_list_length(batch)


def _first_list_length(batch: Any) -> int | None:
    if isinstance(batch, list):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else ()
    return next((length for length in map(_first_list_length, values) if length is not None), None)


def slice_rows(batch: Any, first: int, last: int) -> Any:
    """Samples [first, last) of a batch; what has no row for each sample is kept whole."""
    rows = count_rows(batch)

    def visit(value: Any) -> Any:
        if _is_array(value):
            return value[first:last] if value.ndim and value.shape[0] == rows else value
        if _is_sample_list(value) and len(value) == rows:
            return value[first:last]
        children = map_children(visit, value)
        return value if children is NotImplemented else children

    return visit(batch)


def join_rows(batches: Sequence[Any]) -> Any:
    """One batch of the samples of several; what has no row for each sample is taken from the first.

    Raises:
        ValueError: the batches have different structures, or arrays whose further dimensions differ.
    """
    if len(batches) == 1:
        return batches[0]
    return _join(batches, [count_rows(batch) for batch in batches])


def _join(values: Sequence[Any], rows: Sequence[int | None]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ValueError(
            f"batches of different structures cannot be joined: {sorted({type(value).__name__ for value in values})}"
        )
    if _is_array(first):
        return _join_arrays(values, rows)
    if _is_sample_list(first) and [len(value) for value in values] == list(rows):
        return [sample for value in values for sample in value]
    # The same walk over every batch: the children of the first one are replaced by what their counterparts join to.
    counterparts = iter(list(zip(*(_children(value) for value in values), strict=True)))
    joined = map_children(lambda _: _join(next(counterparts), rows), first)
    return first if joined is NotImplemented else joined


def _children(value: Any) -> list[Any]:
    children: list[Any] = []
    map_children(children.append, value)
    return children


def _join_arrays(arrays: Sequence[Any], rows: Sequence[int | None]) -> Any:
    if any(array.ndim == 0 or array.shape[0] != count for array, count in zip(arrays, rows, strict=True)):
        return arrays[0]
    if len({tuple(array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(
            f"arrays of shapes {[tuple(array.shape) for array in arrays]} cannot be joined along their first dimension"
        )
    return torch.cat(list(arrays)) if isinstance(arrays[0], torch.Tensor) else np.concatenate(arrays)
