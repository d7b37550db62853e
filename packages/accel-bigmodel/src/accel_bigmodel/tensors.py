"""The tensors of a module: listing them, and putting one in place of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_state import clear_device_cache, devices
from accel_state.errors import ConfigurationError

Location = int | str | torch.device
"""Where a tensor is or should be: the index of an accelerator, a torch device or its text; in device maps also "disk".
"""

TiedParamsMap = dict[int, dict[torch.device, torch.Tensor]]
"""For the address of a shared weight: the copies of it that lie on devices at the moment."""


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that a state dict leaves out.

    Args:
        module: where to look.
        recurse: also in its submodules.
        fqns: full names from ``module`` on, rather than those in each submodule.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    found: set[str] = set()
    for name, submodule in module.named_modules():
        prefix = f"{name}." if fqns and name else ""
        found.update(prefix + buffer for buffer in submodule._non_persistent_buffers_set)
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a module: its parameters, then its buffers. A shared tensor comes once.

    Args:
        module: where to look.
        include_buffers: buffers too.
        recurse: those of submodules too.
        remove_non_persistent: leave out the buffers that a state dict leaves out; they are in no checkpoint.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def as_device(location: Location) -> torch.device:
    """The torch device of a location; a number is an accelerator of the kind that this machine has.

    Raises:
        ConfigurationError: a number, and this machine has no accelerator; or text that names no device.
    """
    if isinstance(location, torch.device):
        return location
    if isinstance(location, int):
        kind = devices.detect()
        if kind.name == "cpu":
            raise ConfigurationError(
                f"device {location} is the number of an accelerator, and this machine has none. Use 'cpu' or 'disk' "
                "in its place."
            )
        return torch.device(kind.name, location)
    try:
        return torch.device(location)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{location!r} is not a device: give a number, 'cpu', 'disk' or a torch device ({error})"
        ) from error


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same one; a device without an index is the first of its kind."""
    return first_device.type == second_device.type and (first_device.index or 0) == (second_device.index or 0)


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor, and the tensor's name in it."""
    path, _, name = tensor_name.rpartition(".")
    try:
        return (module.get_submodule(path) if path else module), name
    except AttributeError as error:
        raise ConfigurationError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}") from error


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Location,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParamsMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer of a module to a device, or give it a value there.

    A parameter becomes a new object where its device, type or memory changes; one that shares its value with others
    keeps doing so only through ``tied_params_map`` or :func:`retie_parameters`.

    Args:
        module: what holds it, itself or in a submodule.
        tensor_name: its full name from ``module`` on.
        device: where it should be; "meta" drops the values.
        value: new values, of the same shape; needed to leave the meta device.
        dtype: the type to convert to. None: values get the type that the tensor has now, unless they are integers.
        fp16_statistics: scales of a weight in 8 bits, set on the new parameter as ``SCB``.
        tied_params_map: copies of shared weights on devices, by address; a copy that is there is used, a new one is
            added.
        non_blocking: let a copy from pinned memory overlap with computation.
        clear_cache: hand the memory of an accelerator's old tensor back to it.

    Raises:
        ConfigurationError: no such tensor; a tensor without values and none given; values of another shape.
    """
    owner, name = owner_of(module, tensor_name)
    old = _current(owner, name, tensor_name)
    _check_value(old, value, device, tensor_name)
    if old is None and value is None:
        return
    target = torch.device("meta") if str(device) == "meta" else as_device(device)
    shared = _shared_copy(old, value, target, tied_params_map)
    if shared is not None:
        _put(owner, name, shared)
        return
    source = old if value is None else _converted(value, old, dtype)
    assert source is not None
    if source is old and check_device_same(old.device, target):
        return
    new = _rebuild(old, source, target, name in owner._buffers, non_blocking)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    _remember_copy(source if value is None else value, new, target, tied_params_map)
    _put(owner, name, new)
    if clear_cache and old is not None and old.device.type not in {"cpu", "meta"}:
        clear_device_cache()


def _current(owner: nn.Module, name: str, full_name: str) -> torch.Tensor | None:
    for table in (owner._parameters, owner._buffers):
        if name in table:
            return table[name]
    raise ConfigurationError(f"{full_name!r} is neither a parameter nor a buffer of {type(owner).__name__}")


def _check_value(old: torch.Tensor | None, value: torch.Tensor | None, device: Location, name: str) -> None:
    if value is None and old is not None and old.device.type == "meta" and str(device) != "meta":
        raise ConfigurationError(f"{name} is on the meta device and so has no values to put on {device}: pass value=")
    packed = getattr(old, "quant_state", None) is not None or type(old).__name__ in {
        "Int8Params",
        "FP4Params",
        "Params4bit",
    }
    if value is not None and old is not None and value.shape != old.shape and not packed:
        raise ConfigurationError(
            f"{name} has the shape {tuple(old.shape)}, and the value given has {tuple(value.shape)}"
        )


def _converted(value: torch.Tensor, old: torch.Tensor | None, dtype: str | torch.dtype | None) -> torch.Tensor:
    if dtype is not None:
        return value.to(as_dtype(dtype))
    if old is not None and value.is_floating_point() and old.is_floating_point():
        return value.to(old.dtype)
    return value


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch type from its name ("float16", "torch.float16") or itself.

    Raises:
        ConfigurationError: no such type.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"dtype={dtype!r} is not a torch type; 'float32', 'float16' and torch.bfloat16 are, for example"
        )
    return found


def _rebuild(
    old: torch.Tensor | None, source: torch.Tensor, target: torch.device, is_buffer: bool, non_blocking: bool
) -> torch.Tensor:
    with torch.no_grad():
        moved = source.detach().to(target, non_blocking=non_blocking)
    if is_buffer or old is None:
        return moved if is_buffer else nn.Parameter(moved, requires_grad=moved.is_floating_point())
    return parameter_like(old, moved, target)


def parameter_like(old: torch.Tensor, values: torch.Tensor, target: torch.device) -> nn.Parameter:
    """A parameter of the class of ``old``, with other values, and with the attributes that make it what it is."""
    kind: Any = type(old)
    if kind is nn.Parameter:
        return nn.Parameter(
            values, requires_grad=old.requires_grad and (values.is_floating_point() or values.is_complex())
        )
    # Quantized parameters pack their values when they reach their device, from what their attributes say.
    kept = {key: item for key, item in old.__dict__.items() if key != "_is_hf_initialized"}
    known = getattr(kind, "__new__", None)
    accepted = {key: item for key, item in kept.items() if known is not None and _accepts(known, key)}
    fresh: nn.Parameter = kind(values, requires_grad=old.requires_grad and values.is_floating_point(), **accepted).to(
        target
    )
    return fresh


def _accepts(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    table: Mapping[str, Any] = owner._buffers if name in owner._buffers else owner._parameters
    table[name] = tensor  # type: ignore[index]


def _shared_copy(
    old: torch.Tensor | None, value: torch.Tensor | None, target: torch.device, ties: TiedParamsMap | None
) -> torch.Tensor | None:
    if not ties or target.type == "meta":
        return None
    source = value if value is not None else old
    copies = ties.get(source.data_ptr(), {}) if source is not None else {}
    return next((copy for place, copy in copies.items() if check_device_same(place, target)), None)


def _remember_copy(source: torch.Tensor, new: torch.Tensor, target: torch.device, ties: TiedParamsMap | None) -> None:
    if ties is not None and target.type != "meta" and source.data_ptr() in ties:
        ties[source.data_ptr()][target] = new
