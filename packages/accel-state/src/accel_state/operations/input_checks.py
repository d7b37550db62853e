"""Checks before a collective that all ranks call it with matching inputs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

from ..collectives.header import Call
from ..collectives.single import Collectives
from ..containers import is_dataclass_instance
from ..errors import DistributedOperationException
from ..state import PartialState
from .nested import find_device, get_shape

F = TypeVar("F", bound=Callable[..., Any])


def verify_operation(function: F) -> F:
    """In debug mode, compare operation, structure, shapes and dtypes of all ranks before running a collective.

    Raises:
        DistributedOperationException: (when called, on every rank) they differ; each rank's are listed.
    """

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            data = kwargs["tensor"] if "tensor" in kwargs else args[0]
            check_inputs(f"{function.__module__}.{function.__qualname__}", data, state.collectives)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def chained_operation(function: F) -> F:
    """Add the name of the outer operation to the error of a collective that it uses."""

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__qualname__}"
            raise DistributedOperationException(f"Error found while calling `{operation}`.\n{error}") from error

    return named  # type: ignore[return-value]


def check_inputs(operation: str, data: Any, collectives: Collectives, options: str = "") -> None:
    """Compare the inputs of all ranks: in debug mode of every call, else of those that the schedule selects.

    Raises:
        DistributedOperationException: they differ; each rank's are listed.
    """
    if collectives.world_size == 1 or torch.compiler.is_compiling():
        return
    state = PartialState()
    schedule = collectives.schedule
    due = schedule is not None and schedule.is_due()
    if not (due or state.debug) or state.device_backend.is_capturing():
        return
    call = _call(operation, data, _describe_exactly if state.debug else _describe, options)
    begin = time.perf_counter()
    if schedule is not None and due:
        schedule.plan(collectives.exchange_header(call, schedule.measurements()), time.perf_counter() - begin)
    else:
        collectives.exchange_header(call, (0, 0))
    device = find_device(data) if state.debug else None
    if device is not None and device.type != state.device.type:
        raise DistributedOperationException(
            f"`{operation}` got tensors on {device.type}, but this process communicates through {state.device.type}. "
            "Move them with `.to(accelerator.device)`."
        )


def exchange_lengths(
    operation: str, data: Any, lengths: Sequence[int], collectives: Collectives, ignored_dim: int | None = None
) -> list[list[int]]:
    """Return the lengths of every rank's tensors; compares the inputs in the same message.

    Args:
        operation: name of the caller, for the error.
        data: nested data.
        lengths: a length for each tensor in it.
        collectives: those of the participating ranks.
        ignored_dim: the dimension whose length may differ; None to compare the number of dimensions only.

    Raises:
        DistributedOperationException: the inputs differ otherwise.
    """
    return collectives.exchange_header(call_of(operation, data, ignored_dim), lengths)


def call_of(operation: str, data: Any, ignored_dim: int | None) -> Call:
    """Return what ranks whose tensors differ in length must have in common, for :func:`exchange_lengths`."""

    def describe(tensor: torch.Tensor) -> str:
        if tensor.is_nested:
            return "nested"
        if ignored_dim is None:
            return f"{tensor.ndim or 1} dimensions"
        shape = ["*" if dim == ignored_dim else str(size) for dim, size in enumerate(tensor.shape)]
        return f"{_dtype(tensor)}[{', '.join(shape)}]"

    return _call(operation, data, describe)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe_exactly(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)}{'' if tensor.is_nested else list(tensor.shape)}"


def _describe(tensor: torch.Tensor) -> str:
    # Ranks that pass a scalar and a tensor of length 1 get the same result.
    return _describe_exactly(tensor if tensor.is_nested or tensor.ndim else tensor.reshape(1))


def _call(operation: str, data: Any, describe: Callable[[torch.Tensor], str], options: str = "") -> Call:
    inputs = [(place, describe(tensor)) for place, tensor in _places(data)]
    return Call(operation, options, inputs, shapes=lambda: get_shape(data))


def _places(data: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its place in nested data, such as ``['labels'][0]``, in the order of ``leaves``."""
    if isinstance(data, torch.Tensor):
        yield place, data
    elif isinstance(data, (tuple, list)):
        for i, member in enumerate(data):
            yield from _places(member, f"{place}[{i}]")
    elif isinstance(data, Mapping):
        for key, value in data.items():
            # The text of other objects may contain an address, which differs between processes.
            name = repr(key) if isinstance(key, (str, int, float, bytes)) else type(key).__name__
            yield from _places(value, f"{place}[{name}]")
    elif is_dataclass_instance(data):
        for field in dataclasses.fields(data):
            yield from _places(getattr(data, field.name), f"{place}.{field.name}")
