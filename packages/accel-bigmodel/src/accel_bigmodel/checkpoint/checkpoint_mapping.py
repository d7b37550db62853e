"""Which tensor of a checkpoint goes where in a model; said before anything is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..tensors import Location

_SHOWN = 40


@dataclass
class Place:
    """A tensor of the model, under all its names.

    Attributes:
        name: its first name.
        slots: (module, name in it) of every place that it is at.
        tensor: what is there now.
        is_buffer: a buffer rather than a parameter.
        names: all its names.
    """

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in all places."""
        for owner, key in self.slots:
            (owner._buffers if self.is_buffer else owner._parameters)[key] = tensor  # type: ignore[assignment]


def places_of(model: nn.Module) -> tuple[list[Place], list[str]]:
    """The tensors that a checkpoint of the model holds; and the names of the buffers on the meta device that none
    holds.
    """
    places: dict[int, Place] = {}
    lost: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for is_buffer, table in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = prefix + key
                if is_buffer and key in module._non_persistent_buffers_set:
                    if tensor.device.type == "meta":
                        lost.append(name)
                    continue
                place = places.setdefault(id(tensor), Place(name, tensor, is_buffer))
                place.names.append(name)
                place.slots.append((module, key))
    return list(places.values()), lost


def apart(places: Iterable[Place], location: Callable[[str], Location | None]) -> tuple[list[Place], list[list[str]]]:
    """The places again, where a shared tensor that goes to several locations has a place for each; and the names of
    those tensors.

    Args:
        places: the tensors of a model.
        location: where a name goes.
    """
    found: list[Place] = []
    divided: list[list[str]] = []
    for place in places:
        parts: dict[str, Place] = {}
        for name, slot in zip(place.names, place.slots, strict=True):
            part = parts.setdefault(str(location(name)), Place(name, place.tensor, place.is_buffer))
            part.names.append(name)
            part.slots.append(slot)
        found += parts.values()
        if len(parts) > 1:
            divided.append(place.names)
    return found, divided


@dataclass
class Match:
    """What fits and what does not.

    Attributes:
        sources: the name in the checkpoint of each tensor, by its first name in the model.
        missing: names in the model that the checkpoint does not have.
        unexpected: names in the checkpoint that the model does not have.
        misshapen: what is wrong with the shape of each tensor, by name.
        lost: missing ones, and buffers in no checkpoint, that are on the meta device and so would have no values.
    """

    sources: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    misshapen: dict[str, str]
    lost: list[str]


def match(places: Iterable[Place], shapes: Mapping[str, tuple[int, ...]], lost_buffers: list[str]) -> Match:
    """Compare the tensors of a model with those of a checkpoint.

    Args:
        places: the tensors of the model.
        shapes: names and shapes in the checkpoint.
        lost_buffers: buffers on the meta device that no checkpoint holds.
    """
    found = Match({}, [], [], {}, list(lost_buffers))
    known: set[str] = set()
    for place in places:
        known.update(place.names)
        # Of a shared weight that is there under several names the last one counts, as in load_state_dict.
        source = next((name for name in reversed(place.names) if name in shapes), None)
        if source is None:
            found.missing.append(place.name)
            if place.tensor.device.type == "meta":
                found.lost.append(place.name)
            continue
        found.sources[place.name] = source
        if tuple(shapes[source]) != tuple(place.tensor.shape) and not is_packed(place.tensor):
            found.misshapen[source] = (
                f"{tuple(shapes[source])} in the checkpoint, {tuple(place.tensor.shape)} in the model"
            )
    companions = {f"{name.removesuffix('weight')}SCB" for name in known if name.endswith("weight")}
    found.unexpected = [
        name for name in shapes if name not in known and name not in companions and not name.endswith("_extra_state")
    ]
    return found


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a parameter keeps its values in another form than its shape says (bitsandbytes' classes do)."""
    return type(tensor).__name__ in {"Int8Params", "Params4bit", "FP4Params"}


def check_match(model: nn.Module, checkpoint: str, found: Match, strict: bool) -> None:
    """Refuse a checkpoint that does not fit; warn of what is left over.

    Args:
        model: the model.
        checkpoint: how the checkpoint is called in messages.
        found: what was found.
        strict: refuse whatever is missing or unexpected; else only what would leave a tensor without values.

    Raises:
        ConfigurationError: listing missing, unexpected and misshapen names.
    """
    buffers_only = found.lost and not found.misshapen and not (strict and (found.missing or found.unexpected))
    if buffers_only and not set(found.lost) & set(found.missing):
        raise ConfigurationError(
            f"buffers of {type(model).__name__} are on the meta device, and no checkpoint holds them: "
            f"{_some(found.lost)}. "
            "Build the model with init_empty_weights(include_buffers=False), which keeps the values of buffers, or "
            "set them first."
        )
    faults = [
        f"misshapen ({len(found.misshapen)}): {_some([f'{name}: {what}' for name, what in found.misshapen.items()])}"
    ]
    faults = faults if found.misshapen else []
    refused = bool(found.misshapen or found.lost or (strict and (found.missing or found.unexpected)))
    for what, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        if names:
            faults.append(f"{what} ({len(names)}): {_some(names)}")
    if not faults:
        return
    text = f"the checkpoint {checkpoint} does not fit {type(model).__name__}. " + "; ".join(faults)
    if refused:
        raise ConfigurationError(f"{text}. Nothing was loaded.")
    warnings.warn(f"{text}. What is missing keeps its values, what is unexpected is not used.", stacklevel=4)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
