"""Counting, slicing and joining the samples of batches, whatever structure the collate function produces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accel_state.containers import is_dataclass_instance, is_namedtuple
from accel_state.operations.nested import leaves, map_children


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_sample_list(value: Any) -> bool:
    """Return True if this is a list of samples (strings, dictionaries) rather than a structure that contains arrays."""
    return isinstance(value, list) and not leaves(value, _is_array)


def count_samples(batch: Any) -> int | None:
    """Length of the batch's first array that has a dimension; without arrays, that of its first list, if any."""
    for array in leaves(batch, _is_array):
        if array.ndim:
            # Nested tensors of strided layout have no shape.
            return array.size(0) if isinstance(array, torch.Tensor) else len(array)
    return _first_list_length(batch)


def array_lengths(batch: Any) -> tuple[int, ...]:
    """Lengths of a batch's arrays; without arrays, that of its first list."""
    arrays = leaves(batch, _is_array)
    return tuple(len(array) for array in arrays if array.ndim) or (_first_list_length(batch) or 0,)


def _first_list_length(batch: Any) -> int | None:
    if isinstance(batch, list):
        return len(batch)
    if not isinstance(batch, Mapping | tuple):
        return None
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((length for length in map(_first_list_length, values) if length is not None), None)


def is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    """Return True if a tensor shares memory with another one, or is it."""
    if tensor is of:
        return True
    if any(type(one) is not torch.Tensor or one.layout is not torch.strided for one in (tensor, of)):
        return False
    first, last = of.data_ptr(), of.data_ptr() + of.numel() * of.element_size()
    return tensor.device == of.device and 0 < first <= tensor.data_ptr() < last


def slice_batch(batch: Any, first: int, last: int) -> Any:
    """Return the samples [first, last) of a batch; values without one entry per sample are kept as they are."""
    size = count_samples(batch)

    def visit(value: Any) -> Any:
        if _is_array(value):
            return value[first:last] if value.ndim and value.shape[0] == size else value
        if _is_sample_list(value) and len(value) == size:
            return value[first:last]
        children = map_children(visit, value)
        return value if children is NotImplemented else children

    return visit(batch)


def members(data: Any, name: str) -> list[tuple[str, Any]] | None:
    """Return the direct members of a container, each with its name in an expression; None for a leaf.

    Example:
        >>> members({"x": [1, 2]}, "batch")
        [("batch['x']", [1, 2])]
    """
    if isinstance(data, Mapping):
        return [(f"{name}[{key!r}]", value) for key, value in data.items()]
    if isinstance(data, list | tuple) and not is_namedtuple(data):
        return [(f"{name}[{i}]", value) for i, value in enumerate(data)]
    if is_dataclass_instance(data):
        return [(f"{name}.{field.name}", getattr(data, field.name)) for field in dataclasses.fields(data)]
    return [(f"{name}.{field}", getattr(data, field)) for field in data._fields] if is_namedtuple(data) else None


def have_equal_values(batches: Sequence[Any]) -> bool:
    """Return True if the values that do not have one entry per sample are the same in all batches."""
    first, *others = (dict(_values_of_batch(batch, count_samples(batch))) for batch in batches)
    return all(
        other.keys() == first.keys() and all(_equal(first[name], value) for name, value in other.items())
        for other in others
    )


def _values_of_batch(value: Any, size: int | None, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the values of a batch that do not have one entry per sample, with their names."""
    if _is_array(value):
        per_sample = value.ndim > 0 and value.shape[0] == size
    else:
        per_sample = _is_sample_list(value) and len(value) == size
    if per_sample:
        return
    found = members(value, name)
    # Whether a nested list of arrays has an entry per sample cannot be known if its length is right.
    if found is None or (name != "batch" and isinstance(value, list) and len(value) == size):
        yield name, value
    else:
        for name_of_member, member in found:
            yield from _values_of_batch(member, size, name_of_member)


def _equal(value: Any, other: Any) -> bool:
    """Return True if two values are certainly equal."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    try:
        return bool(value == other)
    except Exception:  # objects whose comparison is not a truth value, such as data frames
        return False


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several; values without one entry per sample are taken from the first batch.

    Raises:
        ValueError: the batches cannot be joined, or a value would seem to have one entry per sample afterwards.
    """
    if len(batches) == 1:
        return batches[0]
    return _concat(batches, [count_samples(batch) for batch in batches])


def _keep_value(value: Any, length: int, sizes: Sequence[int | None]) -> Any:
    if length == sum(size or 0 for size in sizes):
        raise ValueError(f"a value of a whole batch has as many entries ({length}) as there are samples")
    return value


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
    if _is_sample_list(first):
        _keep_value(first, len(first), sizes)
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
        return _keep_value(arrays[0], arrays[0].shape[0], sizes) if arrays[0].ndim else arrays[0]
    if len({tuple(array.shape[1:]) for array in arrays}) > 1:
        raise ValueError(
            f"arrays of shapes {[tuple(array.shape) for array in arrays]} cannot be joined along their first dimension"
        )
    return torch.cat(list(arrays)) if isinstance(arrays[0], torch.Tensor) else np.concatenate(arrays)
