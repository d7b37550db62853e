"""Listing, moving and replacing the tensors of a module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accel_state import clear_device_cache, devices
from accel_state.errors import ConfigurationError

from ._torch_compat import buffers_of, non_persistent_buffers, parameters_of
from .placeholder import Placeholder, has_values

Location = int | str | torch.device
"""The index of an accelerator, a torch device or its name; in device maps also "disk"."""

TiedParamsMap = dict[int, dict[torch.device, torch.Tensor]]
"""For the data pointer of each tied weight, its present copies by device."""

_PACKED_CLASSES = {"Int8Params", "Params4bit", "FP4Params"}


class NoSuchTensorError(ConfigurationError, AttributeError):
    """A name that no parameter or buffer of a module has."""


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict leaves out.

    Args:
        recurse: include submodules.
        fqns: full names from ``module`` on instead of names within each submodule.
    """
    if not recurse:
        return set(non_persistent_buffers(module))
    names: set[str] = set()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if fqns and path else ""
        names.update(prefix + buffer for buffer in non_persistent_buffers(submodule))
    return names


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a module, parameters first. A tied tensor is listed once.

    Args:
        include_buffers: include buffers.
        recurse: include submodules.
        remove_non_persistent: leave out buffers that state dicts, and thus checkpoints, do not contain.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    excluded = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in excluded:
            yield name, buffer


def as_device(location: Location) -> torch.device:
    """Return the torch device of a location; a number is an index of this machine's accelerator type."""
    if isinstance(location, torch.device):
        return location
    if isinstance(location, int):
        device_type = devices.detect()
        if device_type.name == "cpu":
            raise ConfigurationError(
                f"device {location} is the index of an accelerator, and this machine has none. Use 'cpu' or 'disk'."
            )
        return torch.device(device_type.name, location)
    try:
        return torch.device(location)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{location!r} is not a device: give a number, 'cpu', 'disk' or a torch device ({error})"
        ) from error


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return True if two devices are the same; a device without an index equals index 0."""
    return first_device.type == second_device.type and (first_device.index or 0) == (second_device.index or 0)


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds a tensor, and the tensor's name in it."""
    path, _, name = tensor_name.rpartition(".")
    try:
        return (module.get_submodule(path) if path else module), name
    except AttributeError as error:
        raise NoSuchTensorError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}") from error


def tensor_table(owner: nn.Module, name: str) -> dict[str, Any]:
    """Return the dictionary of parameters or buffers that holds a module's tensor."""
    for table in (parameters_of(owner), buffers_of(owner)):
        if name in table:
            return table
    raise NoSuchTensorError(f"{name!r} is neither a parameter nor a buffer of {type(owner).__name__}")


def is_packed(tensor: torch.Tensor) -> bool:
    """Return True if a parameter stores its values in another shape than its own, as those of bitsandbytes do."""
    return type(tensor).__name__ in _PACKED_CLASSES or getattr(tensor, "quant_state", None) is not None


def are_whole_numbers(stored: torch.dtype, tensor: torch.Tensor) -> bool:
    """Return True if stored integers or truth values are those of a tensor, which keeps its dtype, as in torch.

    ``~mask`` of a mask that became an integer is something else. Weights of a class of their own may pack their values.
    """
    is_plain = type(tensor) in {nn.Parameter, torch.Tensor}
    return is_plain and not any(dtype.is_floating_point or dtype.is_complex for dtype in (stored, tensor.dtype))


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a torch dtype from its name ("float16", "torch.float16") or itself."""
    value = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(value, torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is not a torch dtype. Give for example 'float16' or torch.bfloat16.")
    return value


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
    """Move a parameter or buffer of a module to a device, or set its value there.

    A parameter becomes a new object when its device, dtype or memory changes; tied parameters stay tied only through
    ``tied_params_map`` or :func:`retie_parameters`.

    Args:
        tensor_name: full name of the tensor from ``module`` on.
        device: the target device; "meta" drops the values.
        value: new values, of the same shape; required to leave the meta device.
        dtype: the dtype to convert ``value`` to. None: the tensor's current dtype, unless the value is not floating
            point.
        fp16_statistics: scales of an 8-bit weight, set on the new parameter as ``SCB``.
        tied_params_map: copies of tied weights by data pointer and device; an existing copy is reused, a new one added.
        non_blocking: let a copy from pinned memory overlap with computation.
        clear_cache: empty the accelerator's memory cache after releasing the old tensor.

    Raises:
        NoSuchTensorError: no such tensor; a ConfigurationError and an AttributeError.
        ConfigurationError: no values for a tensor on the meta device; a different shape.
    """
    owner, name = owner_of(module, tensor_name)
    table = tensor_table(owner, name)
    old: torch.Tensor | None = table[name]
    if old is None and value is None:
        return
    target = as_device(device)
    if value is None and old is not None and not has_values(old) and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name} is on the meta device, so it has no values to put on {device}: pass value="
        )
    if value is not None and old is not None and value.shape != old.shape and not is_packed(old):
        raise ConfigurationError(
            f"{tensor_name} has shape {tuple(old.shape)}, and the given value has {tuple(value.shape)}"
        )
    source = old if value is None else value
    assert source is not None
    copies = tied_params_map.get(source.data_ptr()) if tied_params_map and target.type != "meta" else None
    for copy_device, present in (copies or {}).items():
        if check_device_same(copy_device, target):
            table[name] = present
            return
    if value is None and check_device_same(source.device, target):
        return
    if value is not None and dtype is not None:
        source = value.to(as_dtype(dtype))
    elif value is not None and old is not None:
        are_floats = value.is_floating_point() and old.is_floating_point()
        source = value.to(old.dtype) if are_floats or are_whole_numbers(value.dtype, old) else value
    new: Any = source.detach().to(target, non_blocking=non_blocking)
    if table is parameters_of(owner):
        new = _parameter_like(old, new, target)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)
    if copies is not None:
        copies[target] = new
    table[name] = new
    if clear_cache and old is not None and old.device.type not in {"cpu", "meta"}:
        clear_device_cache()


def _parameter_like(old: torch.Tensor | None, values: torch.Tensor, target: torch.device) -> nn.Parameter:
    """Return a parameter with the class and attributes of ``old``, and other values."""
    if old is None:
        return nn.Parameter(values, requires_grad=values.is_floating_point())
    if type(old) is nn.Parameter or isinstance(old, Placeholder):
        differentiable = values.is_floating_point() or values.is_complex()
        return nn.Parameter(values, requires_grad=old.requires_grad and differentiable)
    # Quantized parameters pack their values, as their attributes say, when they are moved to a device.
    parameter_class: Any = type(old)
    code = getattr(parameter_class.__new__, "__code__", None)
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code is not None else ()
    settings = {key: item for key, item in old.__dict__.items() if key in accepted}
    requires_grad = old.requires_grad and values.is_floating_point()
    quant_state = settings.get("quant_state")
    if quant_state is not None:
        # Moving a parameter moves its quantization state in place, and that state belongs to ``old`` too. A placeholder
        # on the meta device keeps the values of the state: they are in no checkpoint under the parameter's name.
        if target.type == "meta":
            return parameter_class(values, requires_grad=requires_grad, **settings)
        settings["quant_state"] = copy.deepcopy(quant_state)
    parameter: nn.Parameter = parameter_class(values, requires_grad=requires_grad, **settings).to(target)
    return parameter
