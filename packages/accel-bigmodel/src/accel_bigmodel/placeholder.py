"""Placeholders of offloaded weights: tensors without values, which answer for the values when something uses them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ._torch_compat import untraced, without_torch_function

Tensor = torch.Tensor


class OffloadedValues(Protocol):
    """Where the values of a placeholder are."""

    owner: nn.Module

    def read(self) -> Tensor:
        """Return the values on the device where their module runs."""

    def writable(self) -> contextlib.AbstractContextManager[Tensor]:
        """Return a context with the values; what is written into them lasts. Refuse it where nothing can be written."""

    def device_in_forward(self) -> torch.device | None:
        """Return the device of the values while a forward runs in this thread; None while none does."""


# What a placeholder answers about itself. Everything else needs the values.
_ATTRIBUTES = frozenset(
    {"shape", "dtype", "layout", "requires_grad", "grad", "grad_fn", "ndim", "itemsize", "nbytes", "names", "output_nr"}
)
_METHODS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "dim_order"),
        *("untyped_storage", "data_ptr", "requires_grad_", "get_device", "register_hook", "has_names", "retain_grad"),
        *("register_post_accumulate_grad_hook", "__len__", "__hash__", "__repr__", "__format__", "__dir__", "detach_"),
        "_has_compatible_shallow_copy_type",  # of the tensor itself, when module.to() converts it
    }
)
# These return the tensor itself if it has the dtype and device already.
_CONVERSIONS = frozenset({"to", "type", "float", "double", "half", "bfloat16", "int", "long", "contiguous"})
_IN_PLACE = frozenset(
    {
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
        *("__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    }
)


class Placeholder(Tensor):
    """A tensor on the meta device in the place of an offloaded one, whose shape, dtype and ``requires_grad`` it has.

    An operation gets the values in its place; one that writes into it writes into the values.
    """

    stands_for: OffloadedValues

    @property  # type: ignore[override]
    def __class__(self) -> type[Tensor]:
        """The class of what it stands for: clients give a tensor with the values this class (compressed-tensors)."""
        return nn.Parameter if issubclass(type(self), nn.Parameter) else Tensor

    @__class__.setter
    def __class__(self, kind: type[Tensor]) -> None:
        if kind is not self.__class__:
            object.__dict__["__class__"].__set__(self, kind)

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return _access(func, name, func.__self__.__name__, args)
        if name == "detach":
            return detached(args[0])
        if _is_query(func, name):
            return _ask(func, *args, **kwargs)
        if name in _CONVERSIONS and args and isinstance(args[0], Placeholder) and _keeps(func, *args, **kwargs):
            return args[0]
        return _compute(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = _copy_of(self, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The values are part of the state, not an argument: they refer to the module, and the module to this tensor.
        with without_torch_function():
            described = (tuple(self.shape), self.stride(), self.dtype, self.requires_grad)
        return _rebuild, (type(self), *described), {"stands_for": self.stands_for}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.stands_for = state["stands_for"]


class PlaceholderParameter(Placeholder, nn.Parameter):
    """The placeholder of a parameter."""


class DetachedPlaceholder(Placeholder):
    """What ``detach()``, ``data`` and a state dict give of a placeholder. Copies of it are tensors with the values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.stands_for.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.stands_for.read().clone().__reduce_ex__(protocol)


def placeholder_of(tensor: Tensor, values: OffloadedValues) -> Placeholder:
    """Return a placeholder for a parameter or buffer on any device."""
    kind = PlaceholderParameter if isinstance(tensor, nn.Parameter) else Placeholder
    with without_torch_function():
        placeholder = _make(kind, torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    placeholder.stands_for = values
    return placeholder


def detached(placeholder: Placeholder) -> Placeholder:
    """Return the placeholder without its gradient."""
    with without_torch_function():
        other = _make(DetachedPlaceholder, placeholder.detach(), False)
    other.stands_for = placeholder.stands_for
    return other


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor has values, here or offloaded ones."""
    return isinstance(tensor, Placeholder) or not tensor.is_meta


def without_values(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the meta device like a placeholder, for which nothing answers; others as they are."""
    with without_torch_function():
        return tensor.detach() if isinstance(tensor, Placeholder) else tensor


def _make(kind: type[Any], empty: Tensor, requires_grad: bool) -> Any:
    if issubclass(kind, nn.Parameter):
        return kind(empty, requires_grad=requires_grad)
    return empty.as_subclass(kind).requires_grad_(requires_grad)


def _rebuild(
    kind: type[Any], shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> Any:
    with without_torch_function():
        return _make(kind, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), requires_grad)


def _copy_of(placeholder: Placeholder, memo: dict[int, Any]) -> Tensor:
    """Return a placeholder in a copy of the module that holds it, and a tensor with the values elsewhere."""
    values = placeholder.stands_for
    if id(values.owner) not in memo:
        copied = values.read().clone()
        return nn.Parameter(copied, placeholder.requires_grad) if isinstance(placeholder, nn.Parameter) else copied
    with without_torch_function():
        other: Placeholder = _make(type(placeholder), placeholder.detach().clone(), placeholder.requires_grad)
    memo[id(placeholder)] = other  # the copied values refer to it
    other.stands_for = copy.deepcopy(values, memo)
    return other


def _ask(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with placeholders as they are."""
    with without_torch_function():
        return func(*args, **kwargs)


def _is_query(func: Any, name: str) -> bool:
    """Return True if a function asks about a tensor, not for its values; private methods of tensors do."""
    if name in _METHODS or (name.startswith("is_") and name != "is_nonzero"):
        return True
    return name.startswith("_") and not name.startswith("__") and getattr(Tensor, name, None) is func


def _access(func: Any, how: str, attribute: str, args: Any) -> Any:
    """Read or assign an attribute of a placeholder."""
    placeholder = args[0]
    if attribute == "data":
        return detached(placeholder) if how == "__get__" else _assign(placeholder, args[1])
    # In a forward the values are where the module runs, and code that asks for the device creates tensors there.
    device = placeholder.stands_for.device_in_forward()
    if device is not None and attribute in ("device", "is_meta", f"is_{device.type}"):
        return device if attribute == "device" else attribute == f"is_{device.type}"
    if attribute == "device" or attribute in _ATTRIBUTES or attribute.startswith(("_", "is_")):
        return _ask(func, *args)
    return _compute(func, attribute, args, {})


def _assign(placeholder: Placeholder, new: Tensor) -> None:
    """Take values as ``weight.data = new`` does."""
    if isinstance(new, Placeholder) and new.stands_for is placeholder.stands_for:
        return
    with torch.no_grad(), placeholder.stands_for.writable() as values:
        if new.shape != values.shape or new.dtype != values.dtype:
            raise RuntimeError(
                f"{placeholder.stands_for} is offloaded with shape {tuple(values.shape)} and {values.dtype}, so its "
                f"data cannot become a tensor of shape {tuple(new.shape)} and {new.dtype}. Remove the model's hooks "
                "first (remove_hook_from_submodules), and offload it again afterwards."
            )
        values.copy_(_read(new))


def _keeps(convert: Any, placeholder: Any, *args: Any, **kwargs: Any) -> bool:
    """Return True if a conversion changes neither dtype nor device."""
    plain = without_values(placeholder)
    try:
        return _ask(convert, plain, *args, **kwargs) is plain
    except NotImplementedError:  # torch: a tensor on the meta device has no values to move
        return False


def _compute(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function with the values of placeholders; what it writes into them lasts."""
    writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    target = next(iter((*args, *kwargs.values())), None) if writes else None
    written = [tensor for tensor in _tensors([target, kwargs.get("out")]) if isinstance(tensor, Placeholder)]
    _check_operands(name, target, args, kwargs)
    if not written:
        return func(*_read(args), **_read(kwargs))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        values = {id(tensor.stands_for): stack.enter_context(tensor.stands_for.writable()) for tensor in written}
        result = func(*_read(args, values), **_read(kwargs, values))
    same = next((tensor for tensor in written if values[id(tensor.stands_for)] is result), None)
    return result if same is None else same


def _check_operands(name: str, target: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse to compute with the values and a tensor that lost its own, of which torch makes uninitialised memory."""
    tensors = [tensor for tensor in _tensors([args, list(kwargs.values())]) if tensor is not target]
    placeholder = next((tensor for tensor in tensors if isinstance(tensor, Placeholder)), target)
    lost = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.is_meta]
    if lost and isinstance(placeholder, Placeholder) and not placeholder.stands_for.read().is_meta:
        raise ConfigurationError(
            f"{name} of {placeholder.stands_for}, which is offloaded, and a tensor of shape "
            f"{tuple(lost[0].shape)} on the meta device, which has no values. What was moved to the device of an "
            "offloaded weight has lost them: add adapters before the model is offloaded."
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _read(value: Any, present: dict[int, Tensor] | None = None) -> Any:
    """Replace the placeholders in arguments by their values; those in ``present`` by the given tensors."""
    if isinstance(value, Placeholder):
        found = (present or {}).get(id(value.stands_for))
        return value.stands_for.read() if found is None else found
    if isinstance(value, dict):
        return {key: _read(item, present) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_read(item, present) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_read(item, present) for item in value)
    return value
