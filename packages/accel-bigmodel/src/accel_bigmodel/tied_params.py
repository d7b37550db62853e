"""Parameters that several modules share."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ._torch_compat import buffers_of, parameters_of
from .tensors import Location, owner_of


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return groups of names that refer to the same parameter, each group sorted by name.

    Args:
        **kwargs: ignored; accepted for compatibility.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make each group of names refer to one parameter again: the first of the group that has values.

    Args:
        tied_params: groups of names, from :func:`find_tied_parameters`.
    """
    for group in tied_params:
        slots = [owner_of(model, name) for name in group]
        parameters = [parameters_of(owner)[name] for owner, name in slots]
        with_values = [item for item in parameters if item is not None and item.device.type != "meta"]
        kept = with_values[0] if with_values else parameters[0]
        for owner, name in slots:
            parameters_of(owner)[name] = kept


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True if the configuration of a transformers model ties weights between its embeddings."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    find_output = getattr(model, "get_output_embeddings", None)
    has_output = callable(find_output) and find_output() is not None
    ties_embeddings = getattr(config, "tie_word_embeddings", False) and has_output
    ties_encoder = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(ties_embeddings or ties_encoder or any(hasattr(module, "_tie_weights") for module in model.modules()))


def location_of(name: str, device_map: Mapping[str, Location]) -> Location | None:
    """Return the device map's entry for a tensor or module: its own, or that of the nearest enclosing module."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def with_shared_modules(model: nn.Module, device_map: Mapping[str, Location]) -> Mapping[str, Location]:
    """Return a device map in which a module that the model holds under several names goes where its first name does."""
    first: dict[int, str] = {}
    moved: dict[str, Location] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first_name = first.setdefault(id(module), name)
        if first_name == name:
            continue
        for key in [*parameters_of(module), *buffers_of(module)]:
            location = location_of(f"{first_name}.{key}", device_map)
            if location is not None and str(location) != str(location_of(f"{name}.{key}", device_map)):
                moved[f"{name}.{key}"] = location
    return {**device_map, **moved} if moved else device_map


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Location]
) -> None:
    """Warn where a device map puts a tied parameter on several devices: each holds a copy, and they are not tied."""
    for group in tied_params:
        locations = {name: location_of(name, device_map) for name in group}
        if len(set(map(str, locations.values()))) > 1:
            warnings.warn(
                f"a tied parameter is mapped to several devices, so each holds a copy of it: {locations}", stacklevel=2
            )
