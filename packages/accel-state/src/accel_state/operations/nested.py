"""Traverses nested data, without communication."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper, wraps
from typing import Any, TypeVar

import torch

from ..containers import honor_type, is_dataclass_instance, rebuild_dataclass, rebuild_mapping
from ..containers import is_container as is_container

T = TypeVar("T")


def is_torch_tensor(tensor: Any) -> bool:
    """Return True if the object is a tensor."""
    return isinstance(tensor, torch.Tensor)


@dataclasses.dataclass
class TensorInformation:
    """Shape and dtype of a tensor, to allocate one like it."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return True if the object is a :class:`TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def map_children(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply ``function`` to the direct members of a container; ``NotImplemented`` if ``data`` is not one."""
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
        data: nested lists, tuples, named tuples, mappings and data classes.
        test_type: whether an object is a leaf to apply the function to.
        error_on_other_type: reject other leaves instead of keeping them.

    Returns:
        Data of the same structure.

    Raises:
        TypeError: another leaf was found and ``error_on_other_type`` is set.
    """
    if test_type(data):
        return func(data, *args, **kwargs)
    # Not a recursive closure: that is a reference cycle, which keeps tensors until the garbage collector runs.
    options: dict[str, Any] = {"test_type": test_type, "error_on_other_type": error_on_other_type, **kwargs}
    result = map_children(lambda item: recursively_apply(func, item, *args, **options), data)
    if result is not NotImplemented:
        return result
    if error_on_other_type:
        raise _unsupported(getattr(func, "__name__", str(func)), data)
    return data


def _unsupported(operation: str, item: Any) -> TypeError:
    return TypeError(
        f"{operation} accepts tensors, and lists, tuples, dictionaries, named tuples and data classes of them, not a "
        f"{type(item).__name__}. Remove it from the data, or convert it to a tensor."
    )


def check_only_tensors(data: Any, operation: str) -> None:
    """Raise TypeError if nested data has leaves that are not tensors."""

    def reject(item: Any) -> Any:
        raise _unsupported(operation, item)

    recursively_apply(reject, data, test_type=lambda item: not is_torch_tensor(item) and not is_container(item))


def check_reachable(data: Any, operation: str) -> None:
    """Raise TypeError for tensors that an operation would pass by, or cannot communicate.

    These are the tensors in collections that nested data is not made of, such as a deque, and tensors without strides.
    """

    def check(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if item.layout is not torch.strided or item.is_quantized:
                kind = "a quantized tensor" if item.is_quantized else f"a tensor of layout {item.layout}"
                raise TypeError(f"{operation} does not accept {kind}. Pass a dense one: to_dense() or dequantize().")
        elif isinstance(item, Collection) and not isinstance(item, str | bytes):
            tensors = (member for member in item if isinstance(member, torch.Tensor))
            if next(tensors, None) is not None:
                raise _unsupported(operation, item)

    recursively_apply(check, data, test_type=lambda item: not is_container(item))


def check_no_numbers(data: Any, operation: str) -> None:
    """Raise TypeError if nested data has numbers or arrays, which an operation on tensors would leave as they are."""

    def reject(item: Any) -> Any:
        shown = f"{type(item).__name__} {item!r}" if isinstance(item, numbers.Number) else type(item).__name__
        raise TypeError(
            f"{operation} works on tensors, and would return the {shown} of this rank as it is. Make a tensor of it "
            "(torch.as_tensor), or take it out of the data."
        )

    recursively_apply(reject, data, test_type=_is_number_or_array)


def _is_number_or_array(item: Any) -> bool:
    return isinstance(item, numbers.Number) or (hasattr(item, "__array__") and not is_torch_tensor(item))


def leaves(data: Any, test_type: Callable[[Any], bool] = is_torch_tensor) -> list[Any]:
    """Return every matching leaf, in the order in which :func:`recursively_apply` visits them."""
    matches: list[Any] = []
    recursively_apply(matches.append, data, test_type=test_type)
    return matches


def replace_leaves(data: Any, values: Iterable[Any], test_type: Callable[[Any], bool] = is_torch_tensor) -> Any:
    """Return ``data`` with its matching leaves replaced by ``values``, in the order of :func:`leaves`."""
    iterator: Iterator[Any] = iter(values)
    return recursively_apply(lambda _: next(iterator), data, test_type=test_type)


def send_to_device(
    tensor: T, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> T:
    """Move nested data to a device.

    Args:
        tensor: nested data. Objects with a ``to`` method are moved with it.
        device: a ``torch.device``, its string, or an index.
        non_blocking: overlap copies from pinned memory with computation.
        skip_keys: keys of mappings whose values are not moved.
    """
    skip = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, Mapping) and skip:
            return rebuild_mapping(item, {k: v if k in skip else visit(v) for k, v in item.items()})
        if hasattr(item, "to"):
            try:
                return item.to(device, non_blocking=non_blocking)
            except TypeError:  # batch objects of other libraries often accept the device only
                return item.to(device)
        result = map_children(visit, item)
        return item if result is NotImplemented else result

    return visit(tensor)


def get_data_structure(data: Any) -> Any:
    """Return the structure of nested data, with each tensor replaced by its :class:`TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return the structure of nested data, with each tensor replaced by its shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialized tensors for a structure from :func:`get_data_structure`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in nested data.

    Raises:
        ValueError: the data is empty, or its first tensor is 0-dimensional.
        TypeError: the data contains no tensor.
    """
    if isinstance(data, (tuple, list, Mapping)) and len(data) == 0:
        raise ValueError(f"cannot find a batch size in an empty {type(data).__name__}")
    for tensor in leaves(data):
        if tensor.ndim:
            return int(tensor.shape[0])
        raise ValueError("cannot find a batch size: the first tensor is 0-dimensional")
    raise TypeError(f"cannot find a batch size in a {type(data).__name__} without tensors")


def ignorant_find_batch_size(data: Any) -> int | None:
    """:func:`find_batch_size`, or None instead of an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data, or None."""
    tensors = leaves(data)
    return tensors[0].device if tensors else None


def listify(data: Any) -> Any:
    """Nested data with each tensor replaced by its values as a list (or a number)."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Concatenate several pieces of nested data of the same structure.

    Leaves that are not tensors become a list of their values in the pieces, with a warning.

    Args:
        data: the pieces.
        dim: the dimension along which tensors are concatenated.
    """
    pieces: Sequence[Any] = data
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(pieces), dim=dim)  # type: ignore[return-value]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([piece[i] for piece in pieces], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([piece[key] for piece in pieces], dim=dim) for key in first})
    if is_dataclass_instance(first):
        names = [f.name for f in dataclasses.fields(first)]
        return rebuild_dataclass(
            first, {n: concatenate([getattr(piece, n) for piece in pieces], dim=dim) for n in names}
        )
    warnings.warn(f"concatenate returns values of type {type(first).__name__} as a list", stacklevel=2)
    return list(pieces)  # type: ignore[return-value]


def slice_tensors(
    data: T, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> T:
    """Take a slice of the first dimension of every tensor in nested data.

    ``process_index`` and ``num_processes`` are accepted for custom slicing functions, and unused here.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


_HALF_TYPES = (torch.float16, torch.bfloat16)


def _is_half(tensor: Any) -> bool:
    # Some data objects raise on unknown attributes, so the type is checked first.
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _HALF_TYPES


def convert_to_fp32(tensor: T) -> T:
    """Convert the float16 and bfloat16 tensors in nested data to float32; everything else is unchanged."""
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


class ConvertOutputsToFp32:
    """Wraps a forward function to convert its half-precision outputs to float32; can be pickled if the function can."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        # Without __wrapped__: some functions cannot be pickled through that second reference.
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model_forward"])  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function to convert its half-precision outputs to float32."""
    converter = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    return forward
