"""Walking nested data, without communication."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def is_torch_tensor(tensor: Any) -> bool:
    """Whether the object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether the object is a named tuple (from collections or typing)."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build an object of the type of ``obj`` (a list, tuple or named tuple) from the values of ``generator``."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


@dataclasses.dataclass
class TensorInformation:
    """What must be known of a tensor to make room for it."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether the object is a :class:`TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_dataclass_instance(data: Any) -> bool:
    """Whether the object is an instance of a data class (and not the class)."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_container(data: Any) -> bool:
    """Whether the object is nested data rather than a leaf."""
    return isinstance(data, (tuple, list, Mapping)) or is_dataclass_instance(data)


def rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of ``data`` with the same keys and new values."""
    if type(data) is dict:
        return items
    if not hasattr(data, "__setitem__"):
        return type(data)(items)  # type: ignore[call-arg]
    # Copying keeps what a subclass holds beside its items (a default factory, a tokenizer's encodings, ...).
    new = copy.copy(data)
    for key, value in items.items():
        new[key] = value
    return new


def rebuild_dataclass(data: Any, values: dict[str, Any]) -> Any:
    """A data class instance of the type of ``data`` with new field values; frozen ones and ``init=False`` fields too."""
    new = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def map_children(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply ``function`` to the direct members of a container.

    Returns:
        A container of the same type, or ``NotImplemented`` if ``data`` is not a container.
    """
    if isinstance(data, (tuple, list)):
        return honor_type(data, (function(member) for member in data))
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: function(value) for key, value in data.items()})
    if is_dataclass_instance(data) and not isinstance(data, TensorInformation):
        return rebuild_dataclass(data, {f.name: function(getattr(data, f.name)) for f in dataclasses.fields(data)})
    return NotImplemented


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every matching leaf of nested data.

    Args:
        func: called as ``func(leaf, *args, **kwargs)``.
        data: lists, tuples, named tuples, mappings and data classes, nested at will.
        test_type: says which objects are leaves to work on.
        error_on_other_type: refuse other leaves instead of passing them through.

    Returns:
        Data of the same structure.

    Raises:
        TypeError: another leaf was found and ``error_on_other_type`` is set.
    """

    def visit(item: Any) -> Any:
        if test_type(item):
            return func(item, *args, **kwargs)
        result = map_children(visit, item)
        if result is not NotImplemented:
            return result
        if error_on_other_type:
            raise _unsupported(getattr(func, "__name__", str(func)), item)
        return item

    return visit(data)


def _unsupported(operation: str, item: Any) -> TypeError:
    return TypeError(
        f"{operation} works on tensors, and on lists, tuples, dictionaries, named tuples and data classes of them; "
        f"it met a {type(item).__name__}. Take it out of the data, or turn it into a tensor."
    )


def check_only_tensors(data: Any, operation: str) -> None:
    """Refuse nested data that holds anything but tensors.

    Raises:
        TypeError: naming the operation and the type that was met.
    """

    def refuse(item: Any) -> Any:
        raise _unsupported(operation, item)

    recursively_apply(refuse, data, test_type=lambda item: not is_torch_tensor(item) and not is_container(item))


def leaves(data: Any, test_type: Callable[[Any], bool] = is_torch_tensor) -> list[Any]:
    """Every matching leaf, in the order in which :func:`recursively_apply` visits them."""
    found: list[Any] = []
    recursively_apply(found.append, data, test_type=test_type)
    return found


def replace_leaves(data: Any, values: Iterable[Any], test_type: Callable[[Any], bool] = is_torch_tensor) -> Any:
    """Data of the same structure with its matching leaves replaced by ``values``, in the order of :func:`leaves`."""
    iterator: Iterator[Any] = iter(values)
    return recursively_apply(lambda _: next(iterator), data, test_type=test_type)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Move nested data to a device.

    Args:
        tensor: nested data. Objects with a ``to`` method of their own are moved by it.
        device: a ``torch.device``, its string, or an index.
        non_blocking: let copies from pinned memory overlap with computation.
        skip_keys: keys of mappings whose values stay where they are.
    """
    skip = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, Mapping) and skip:
            return rebuild_mapping(item, {k: v if k in skip else visit(v) for k, v in item.items()})
        if hasattr(item, "to"):
            return _move_object(item, device, non_blocking)
        result = map_children(visit, item)
        return item if result is NotImplemented else result

    return visit(tensor)


def _move_object(item: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:  # batch objects of other libraries often take the device only
        return item.to(device)


def get_data_structure(data: Any) -> Any:
    """The structure of nested data, with each tensor replaced by its :class:`TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The structure of nested data, with each tensor replaced by its shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialised tensors for a structure from :func:`get_data_structure`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """The size of the first dimension of the first tensor in nested data.

    Raises:
        ValueError: there is no tensor with a first dimension.
        TypeError: the data is not nested data of tensors.
    """
    if isinstance(data, (tuple, list, Mapping)) and len(data) == 0:
        raise ValueError(f"no batch size can be found in an empty {type(data).__name__}")
    for tensor in leaves(data):
        if tensor.ndim:
            return int(tensor.shape[0])
        raise ValueError("no batch size can be found: the first tensor is 0-dimensional")
    raise TypeError(f"no batch size can be found in a {type(data).__name__} that holds no tensor")


def ignorant_find_batch_size(data: Any) -> int | None:
    """:func:`find_batch_size`, or None where there is none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data, or None."""
    found = leaves(data)
    return found[0].device if found else None


def listify(data: Any) -> Any:
    """Nested data with each tensor replaced by a list of numbers (or one number)."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate several pieces of nested data of one structure.

    Args:
        data: the pieces; each holds the same containers, with tensors at the same places.
        dim: the dimension along which tensors are joined.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([piece[i] for piece in data], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([piece[key] for piece in data], dim=dim) for key in first})
    if is_dataclass_instance(first):
        names = [f.name for f in dataclasses.fields(first)]
        return rebuild_dataclass(first, {n: concatenate([getattr(piece, n) for piece in data], dim=dim) for n in names})
    raise TypeError(f"concatenate works on nested tensors; it met a {type(first).__name__}")


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take a slice of every tensor in nested data.

    Args:
        data: nested data.
        tensor_slice: the slice of the first dimension.
        process_index: accepted for slicing functions that need to know the rank; the slice says all there is to say
            here.
        num_processes: likewise, the world size.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)
