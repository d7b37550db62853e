"""Building a model without values on the meta device, or directly on its device."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import env

from ._torch_compat import buffers_of, parameters_of

# Bytes. Tables that a model computes itself, and whose values must survive, are smaller than _HUGE.
_LARGE, _HUGE = 1 << 17, 1 << 30


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models with shapes and dtypes but without values, so they take no memory, whatever their size.

    Args:
        include_buffers: put buffers on the meta device too. By default they keep their values, because those that no
            checkpoint holds (position tables, for example) could not be restored. None: the variable
            ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else False.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters are on ``device`` from the start. Tied parameters stay tied.

    Args:
        device: the device of the parameters.
        include_buffers: put buffers there too. None: the variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``, else False.
    """
    if include_buffers is None:
        include_buffers = env.parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    target = torch.device(device)
    moved = WeakIdKeyDictionary()  # a tensor that is registered twice stays one tensor
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is not None and param.device != target:
            if param not in moved:
                moved[param] = _moved_parameter(param, target)
            parameters_of(module)[name] = moved[param]

    def buffer_on_device(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor, persistent=persistent)
        if tensor is not None and tensor.device != target:
            if tensor not in moved:
                moved[tensor] = tensor.to(target)
            buffers_of(module)[name] = moved[tensor]

    nn.Module.register_parameter = parameter_on_device  # type: ignore[method-assign,assignment]
    if include_buffers:
        nn.Module.register_buffer = buffer_on_device  # type: ignore[method-assign,assignment]
    empty = torch.empty
    torch.empty = _short_lived(empty, target)
    try:
        yield
    finally:
        torch.empty = empty
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


def _short_lived(empty: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """A ``torch.empty`` whose large tensors return their memory to the system as soon as they are moved.

    The C library keeps the memory of tensors below 32 MB if a small allocation follows them, so a model of many layers
    would take its full size. Large tensors therefore get their own mapping, and huge ones are created on the device.
    It takes the function's place in torch, because a mode would slow down every other call as well.
    """

    def short_lived_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None or kwargs.keys() - {"device", "dtype", "size", "requires_grad"}:
            return empty(*args, **kwargs)
        size = kwargs.get("size", args)
        shape = tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= _HUGE:
            kwargs["device"] = device
        elif nbytes >= _LARGE and torch.get_default_device().type == "cpu":
            # Windows lacks the flag; its mappings without a file are private anyway.
            flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            memory = torch.frombuffer(mmap.mmap(-1, nbytes, **flags), dtype=torch.uint8)
            return memory.view(dtype).view(shape).requires_grad_(bool(kwargs.get("requires_grad")))
        return empty(*args, **kwargs)

    return short_lived_empty


def _moved_parameter(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter on another device, with the same class and attributes."""
    if type(param) is nn.Parameter:
        new = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)
        return new
    settings: dict[str, Any] = {**param.__dict__, "requires_grad": param.requires_grad}
    return type(param)(param.detach().to(device), **settings)
