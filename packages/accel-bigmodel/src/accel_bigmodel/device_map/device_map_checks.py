"""Shortening, checking and printing device maps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from accel_state import convert_bytes, devices
from accel_state.errors import ConfigurationError

from ..checkpoint.checkpoint_mapping import join_names
from ..sizes import named_tensors, tensor_bytes
from ..tensors import Location, as_device
from ..tied_params import location_of

_MAX_NAMES = 5


def clean_device_map(device_map: dict[str, Location], module_name: str = "") -> dict[str, Location]:
    """Replace the entries of a module's parts by one of the module, where all of them are on one device.

    Args:
        device_map: names and devices; it is changed.
        module_name: shorten only entries inside this module; "" is the whole model.

    Returns:
        The map.
    """
    inside = [name for name in device_map if module_name in ("", name) or name.startswith(f"{module_name}.")]
    on_several: set[str] = set()
    device_of: dict[str, Location] = {}
    counts: dict[str, int] = {}
    for name in inside:
        for module in _enclosing_modules(name, module_name):
            counts[module] = counts.get(module, 0) + 1
            if device_of.setdefault(module, device_map[name]) != device_map[name]:
                on_several.add(module)
    shorter: dict[str, Location] = {}
    for name in inside:
        modules = _enclosing_modules(name, module_name)
        key = next((module for module in modules if module not in on_several and counts[module] > 1), name)
        shorter[key] = device_map[name]
    replaced = set(inside)
    outside = {name: device for name, device in device_map.items() if name not in replaced}
    device_map.clear()
    device_map.update({**outside, **shorter})
    return device_map


def _enclosing_modules(name: str, top: str) -> list[str]:
    """Return the names from ``top`` down to ``name``, both included."""
    names = [top]
    end = name.find(".", len(top) + 1 if top else 0)
    while end != -1:
        names.append(name[:end])
        end = name.find(".", end + 1)
    if name != top:
        names.append(name)
    return names


def check_device_map(model: nn.Module, device_map: Mapping[str, Location]) -> None:
    """Refuse a device map that leaves out tensors of the model, and warn of names that the model does not have.

    Whether this machine has the devices is checked when they are used.

    Args:
        device_map: names of modules or tensors, and devices.

    Raises:
        ConfigurationError: naming the tensors without a device.
    """
    unmapped = [name for name, _ in named_tensors(model) if location_of(name, device_map) is None]
    if unmapped:
        raise ConfigurationError(
            f"the device map gives no device to {join_names(unmapped, _MAX_NAMES)}. Add their modules, or "
            '"": <device> as the default.'
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known.update(
        dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers(remove_duplicate=False))
    )
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"the device map names {join_names(unknown, _MAX_NAMES)}, but {type(model).__name__} has no such module or "
            "tensor: these entries are ignored",
            stacklevel=2,
        )


def check_devices(device_map: Mapping[str, Location]) -> None:
    """Refuse a device map with a device that this machine does not have."""
    for location in {str(location): location for location in device_map.values()}.values():
        device = None if location == "disk" else as_device(location)
        if device is None or device.index is None or device.type not in devices.names():
            continue
        count = devices.get(device.type).device_count()
        if device.index >= max(1, count):
            raise ConfigurationError(
                f"the device map has {location!r}, and this machine has {count} of {device.type}; indexes begin at 0"
            )


def describe_device_map(model: nn.Module, device_map: Mapping[str, Location] | None = None) -> str:
    """Return a device map as text: one line for each entry with its device and size, then the totals by device.

    Args:
        device_map: the map. None: that of a dispatched model, ``model.hf_device_map``.

    Raises:
        ConfigurationError: no map given, and the model has none.
    """
    device_map = device_map if device_map is not None else getattr(model, "hf_device_map", None)
    if device_map is None:
        raise ConfigurationError(f"{type(model).__name__} has no device map: dispatch it first, or give device_map=")
    sizes = dict.fromkeys(device_map, 0)
    for name, tensor in named_tensors(model):
        while name not in sizes and name:
            name = name.rpartition(".")[0]
        if name in sizes:
            sizes[name] += tensor_bytes(tensor)
    width = max([len(name or "(model)") for name in sizes], default=0)
    lines, totals = [], dict.fromkeys(map(str, device_map.values()), 0)
    for name, size in sizes.items():
        lines.append(f"{name or '(model)':<{width}}  {device_map[name]!s:<8} {convert_bytes(size):>12}")
        totals[str(device_map[name])] += size
    sums = ", ".join(f"{device}: {convert_bytes(size)}" for device, size in totals.items())
    return "\n".join([*lines, f"{'sum':<{width}}  {sums}"])
