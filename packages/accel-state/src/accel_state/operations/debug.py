"""Debug mode: checks before a collective that all ranks call it with matching inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from ..collectives.single import Collectives
from ..errors import CollectiveTimeoutError, DistributedOperationException
from ..state import PartialState
from .nested import find_device, get_shape, is_container, recursively_apply

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
            _verify(f"{function.__module__}.{function.__qualname__}", data, state.collectives)
            _verify_device(function.__qualname__, data, state.device.type)
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


def _verify(operation: str, data: Any, collectives: Collectives) -> None:
    try:
        calls = collectives.all_gather_object((operation, _signature(data), get_shape(data)))
    except CollectiveTimeoutError as error:
        raise DistributedOperationException(
            f"The ranks could not compare their inputs for `{operation}`.\n{error}"
        ) from error
    if any(call[:2] != calls[0][:2] for call in calls):
        raise DistributedOperationException(_message(calls))


def _signature(data: Any) -> str:
    """Structure, shapes and dtypes as text; only the type of other objects, whose values may differ."""

    def describe(item: Any) -> str:
        if isinstance(item, torch.Tensor):
            return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        return type(item).__name__

    return str(recursively_apply(describe, data, test_type=lambda item: not is_container(item)))


def _message(calls: list[tuple[str, str, Any]]) -> str:
    operations = [op for op, _, _ in calls]
    lines = ["Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid.", ""]
    if len(set(operations)) > 1:
        lines[0] = "Cannot apply desired operation: the ranks called different operations."
        lines += ["Operations:"] + [f"  - Process {rank}: `{op}`" for rank, op in enumerate(operations)]
    else:
        lines += [f"Operation: `{operations[0]}`"]
    shapes = [shape for _, _, shape in calls]
    lines += ["Input shapes:"] + [f"  - Process {rank}: {shape}" for rank, shape in enumerate(shapes)]
    if len(set(operations)) == 1 and all(shape == shapes[0] for shape in shapes):
        lines[0] = "Cannot apply desired operation: the dtypes or structures of the ranks differ."
        lines += ["Inputs:"] + [f"  - Process {rank}: {signature}" for rank, (_, signature, _) in enumerate(calls)]
    lines.append("If only a length differs, pad with `pad_across_processes` first.")
    return "\n".join(lines)


def _verify_device(operation: str, data: Any, device_type: str) -> None:
    device = find_device(data)
    if device is not None and device.type != device_type:
        raise DistributedOperationException(
            f"`{operation}` got tensors on {device.type}, but this process communicates through {device_type}. "
            "Move them with `.to(accelerator.device)`."
        )
