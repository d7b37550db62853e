"""Making a device map shorter, checking it, and showing it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from accel_state import convert_bytes
from accel_state.errors import ConfigurationError

from ..sizes import named_tensors, tensor_bytes
from ..tensors import Location, as_device
from ..tied_params import location_of


def clean_device_map(device_map: dict[str, Location], module_name: str = "") -> dict[str, Location]:
    """Name a module instead of its parts wherever all of them are on one device. The map is changed and returned.

    Args:
        device_map: names and devices.
        module_name: look only inside this module. "" is the whole model.
    """
    inside = [
        name for name in device_map if module_name == "" or name == module_name or name.startswith(f"{module_name}.")
    ]
    several: set[str] = set()
    device_of: dict[str, Location] = {}
    parts: dict[str, int] = {}
    for name in inside:
        for around in _modules_around(name, module_name):
            parts[around] = parts.get(around, 0) + 1
            if device_of.setdefault(around, device_map[name]) != device_map[name]:
                several.add(around)
    shorter: dict[str, Location] = {}
    for name in inside:
        around = next((a for a in _modules_around(name, module_name) if a not in several and parts[a] > 1), name)
        shorter[around] = device_map[name]
    replaced = set(inside)
    outside = {name: device for name, device in device_map.items() if name not in replaced}
    device_map.clear()
    device_map.update({**outside, **shorter})
    return device_map


def _modules_around(name: str, top: str) -> list[str]:
    """The names of the modules around something, from ``top`` down to itself."""
    found = [top]
    end = name.find(".", len(top) + 1 if top else 0)
    while end != -1:
        found.append(name[:end])
        end = name.find(".", end + 1)
    if name != top:
        found.append(name)
    return found


def check_device_map(model: nn.Module, device_map: Mapping[str, Location]) -> None:
    """Refuse a device map that does not say where every tensor of the model goes, or names what is not there.

    Args:
        model: the model.
        device_map: names of modules or tensors, and devices.

    Raises:
        ConfigurationError: naming the tensors without a device, or the names and devices that do not exist.
    """
    tensors = [name for name, _ in named_tensors(model)]
    without = [name for name in tensors if location_of(name, device_map) is None]
    if without:
        raise ConfigurationError(
            f'the device map gives no device to {_some(without)}. Add their modules, or "": <device> for all that has '
            "none."
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | {
        name for name, _ in _all_tensors(model)
    }
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ConfigurationError(
            f"the device map names {_some(unknown)}, and {type(model).__name__} has no such module or tensor"
        )
    for location in {str(place): place for place in device_map.values()}.values():
        if location != "disk":
            as_device(location)


def _all_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _some(names: list[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def describe_device_map(model: nn.Module, device_map: Mapping[str, Location] | None = None) -> str:
    """A device map as text: each line an entry with its device and size, then the sums by device.

    Args:
        model: the model.
        device_map: the map. None: that of a dispatched model, ``model.hf_device_map``.

    Raises:
        ConfigurationError: no map given, and the model has none.
    """
    device_map = device_map if device_map is not None else getattr(model, "hf_device_map", None)
    if device_map is None:
        raise ConfigurationError(f"{type(model).__name__} has no device map: dispatch it first, or give device_map=")
    sizes = dict.fromkeys(device_map, 0)
    for name, tensor in named_tensors(model):
        entry = name
        while entry not in sizes and entry:
            entry = entry.rpartition(".")[0]
        if entry in sizes:
            sizes[entry] += tensor_bytes(tensor)
    width = max([len(name or "(model)") for name in sizes], default=0)
    lines = [
        f"{name or '(model)':<{width}}  {device_map[name]!s:<8} {convert_bytes(size):>12}"
        for name, size in sizes.items()
    ]
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        totals[str(device_map[name])] = totals.get(str(device_map[name]), 0) + size
    sums = ", ".join(f"{device}: {convert_bytes(size)}" for device, size in totals.items())
    return "\n".join([*lines, f"{'sum':<{width}}  {sums}"])
