"""Parameters that several modules share."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .tensors import Location, owner_of


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The groups of names that stand for one and the same parameter, each group sorted by name.

    Args:
        model: any model, on the meta device too.
        **kwargs: none is known; accepted for callers of older versions.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Let each group of names stand for one parameter again, where that was lost.

    The one that is kept is the first that has values.

    Args:
        model: the model.
        tied_params: groups of names, as :func:`find_tied_parameters` gives them.
    """
    for group in tied_params:
        found = [(owner, name, owner._parameters[name]) for owner, name in (owner_of(model, full) for full in group)]
        with_values = [
            parameter for _, _, parameter in found if parameter is not None and parameter.device.type != "meta"
        ]
        kept = with_values[0] if with_values else found[0][2]
        for owner, name, _ in found:
            owner._parameters[name] = kept


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the configuration of a transformers model says that it shares weights between its embeddings."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    shares_embeddings = bool(getattr(config, "tie_word_embeddings", False)) and _has_output_embeddings(model)
    shares_encoder = bool(getattr(config, "is_encoder_decoder", False)) and bool(
        getattr(config, "tie_encoder_decoder", False)
    )
    return shares_embeddings or shares_encoder or any(hasattr(module, "_tie_weights") for module in model.modules())


def _has_output_embeddings(model: nn.Module) -> bool:
    find = getattr(model, "get_output_embeddings", None)
    return callable(find) and find() is not None


def location_of(name: str, device_map: Mapping[str, Location]) -> Location | None:
    """The entry of a device map that holds for a tensor or module: its own, or that of the nearest module around it."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def with_shared_modules(model: nn.Module, device_map: Mapping[str, Location]) -> Mapping[str, Location]:
    """The device map, in which a module that the model has under several names goes where its first name does.

    Args:
        model: the model.
        device_map: names of modules or tensors, and locations.
    """
    first: dict[int, str] = {}
    moved: dict[str, Location] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), name)
        for key in [*module._parameters, *module._buffers] if known != name else ():
            location = location_of(f"{known}.{key}", device_map)
            if location is not None and str(location) != str(location_of(f"{name}.{key}", device_map)):
                moved[f"{name}.{key}"] = location
    return {**device_map, **moved} if moved else device_map


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Location]
) -> None:
    """Warn where a device map puts names of one shared parameter on several devices: each would have a copy of its own."""
    for group in tied_params:
        places = {name: location_of(name, device_map) for name in group}
        if len(set(map(str, places.values()))) > 1:
            warnings.warn(
                f"a shared parameter is put on several devices, so each holds a copy of it: {places}", stacklevel=2
            )
