"""Building a model without its values: on the meta device, or directly where it should be."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import env

# Bytes. Tables that a model computes for itself, which must keep their values, are smaller than huge.
_LARGE, _HUGE = 1 << 17, 1 << 30


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built in this context have shapes and types, and no values: they take no memory, whatever their
    size.

    Args:
        include_buffers: buffers too. By default they keep their values: buffers that no checkpoint holds (tables of
            positions, say) could not be found again. None: what ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else False.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built in this context have their parameters on ``device`` from the start.

    Parameters that are shared stay shared.

    Args:
        device: where parameters are put.
        include_buffers: buffers too. None: what ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, else False.
    """
    if include_buffers is None:
        include_buffers = env.parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    target = torch.device(device)
    moved = WeakIdKeyDictionary()  # what is registered twice stays one tensor
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is not None and param.device != target:
            if param not in moved:
                moved[param] = _moved(param, target)
            module._parameters[name] = moved[param]

    def buffer_on_device(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor, persistent=persistent)
        if tensor is not None and tensor.device != target:
            if tensor not in moved:
                moved[tensor] = tensor.to(target)
            module._buffers[name] = moved[tensor]

    nn.Module.register_parameter = parameter_on_device  # type: ignore[method-assign,assignment]
    if include_buffers:
        nn.Module.register_buffer = buffer_on_device  # type: ignore[method-assign,assignment]
    try:
        with _Passing(target):
            yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


class _Passing(TorchFunctionMode):
    """Uninitialised tensors that only pass through memory: a layer may be larger than it, and many layers together are.

    The C library does not hand the space of tensors back that are smaller than 32 MB, if anything small has been put
    behind them. So large ones get a mapping of their own, and huge ones are made on the device at once.

    Args:
        device: where parameters go.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func is torch.empty
            and kwargs.get("device") is None
            and not kwargs.keys() - {"device", "dtype", "size", "requires_grad"}
        ):
            shape, dtype = _shape(args, kwargs), kwargs.get("dtype") or torch.get_default_dtype()
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes >= _HUGE:
                kwargs["device"] = self.device
            elif nbytes >= _LARGE and torch.get_default_device().type == "cpu":
                return _mapped(nbytes).view(dtype).view(shape).requires_grad_(bool(kwargs.get("requires_grad")))
        return func(*args, **kwargs)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    shape = kwargs.get("size", args)
    return tuple(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _mapped(nbytes: int) -> torch.Tensor:
    """Memory that goes back to the system as soon as nobody uses it."""
    # Where there is no such flag (Windows) mappings without a file are private anyway.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, nbytes, **flags), dtype=torch.uint8)


def _moved(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter on another device, of the same class and with the same attributes."""
    if type(param) is nn.Parameter:
        new = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)
        return new
    settings: dict[str, Any] = {**param.__dict__, "requires_grad": param.requires_grad}
    return type(param)(param.detach().to(device), **settings)
