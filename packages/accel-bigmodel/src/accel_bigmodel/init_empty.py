"""Building a model without values on the meta device, or directly on its device."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accel_state import env

from ._torch_compat import buffers_of, parameters_of

# Bytes. Tables that a model computes itself, and whose values must survive, are smaller than _HUGE.
_LARGE, _HUGE = 1 << 17, 1 << 30
_KNOWN = frozenset({"device", "dtype", "size", "requires_grad"})  # arguments of torch.empty


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
    moved = _Moved()
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is not None and param.device != target:
            new = moved.get(param)
            if new is None:
                new = moved.add(param, _moved_parameter(param, target))
            parameters_of(module)[name] = new

    def buffer_on_device(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor, persistent=persistent)
        if tensor is not None and tensor.device != target:
            new = moved.get(tensor)
            buffers_of(module)[name] = moved.add(tensor, tensor.to(target)) if new is None else new

    nn.Module.register_parameter = parameter_on_device  # type: ignore[method-assign,assignment]
    if include_buffers:
        nn.Module.register_buffer = buffer_on_device  # type: ignore[method-assign,assignment]
    empty = torch.empty
    torch.empty = _short_lived(empty, target)
    try:
        with _no_random_values() if target.type == "meta" else contextlib.nullcontext():
            yield
    finally:
        torch.empty = empty
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


class _Moved:
    """The tensors in place of those that were moved: a tensor that is registered twice stays one tensor.

    A dictionary by number, checked by weak references: torch's WeakIdKeyDictionary takes longer than the move.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what a tensor was replaced by; None if it was not."""
        known, new = self._found.get(id(tensor), (None, None))
        # Another tensor may have had the number before.
        return new() if known is not None and new is not None and known() is tensor else None

    def add(self, tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Remember and return a replacement."""
        self._found[id(tensor)] = (weakref.ref(tensor), weakref.ref(new))
        return new


@contextlib.contextmanager
def _no_random_values() -> Iterator[None]:
    """Let ``Tensor.uniform_``, with which linear layers are initialized, return tensors without values at once.

    torch runs a decomposition in Python for them, a third of the time that building such a layer takes.
    """
    own = torch.Tensor.__dict__.get("uniform_")  # of a context around this one; torch's is inherited
    uniform = torch.Tensor.uniform_

    def uniform_if_real(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Autograd has something to say to a change of a parameter.
        if tensor.is_meta and not torch.is_grad_enabled():
            return tensor
        return uniform(tensor, *args, **kwargs)

    torch.Tensor.uniform_ = uniform_if_real  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if own is None:
            del torch.Tensor.uniform_
        else:
            torch.Tensor.uniform_ = own  # type: ignore[method-assign]


def _short_lived(empty: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a ``torch.empty`` whose large tensors return their memory to the system as soon as they are moved.

    The C library keeps the memory of tensors below 32 MB if a small allocation follows them, so a model of many layers
    would take its full size. Large tensors therefore get their own mapping, and huge ones are created on the device.
    It takes the function's place in torch, because a mode would slow down every other call as well.
    """

    def short_lived_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None or not kwargs.keys() <= _KNOWN:
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
    """Return the parameter on another device, with the same class and attributes."""
    if type(param) is nn.Parameter:
        # One call instead of two, with the same strides.
        plain = device.type == "meta" and param.layout is torch.strided
        data = torch.empty_like(param, device=device) if plain else param.detach().to(device)
        new = nn.Parameter(data, requires_grad=param.requires_grad)
        if param.__dict__:
            new.__dict__.update(param.__dict__)
        return new
    settings: dict[str, Any] = {**param.__dict__, "requires_grad": param.requires_grad}
    return type(param)(param.detach().to(device), **settings)
