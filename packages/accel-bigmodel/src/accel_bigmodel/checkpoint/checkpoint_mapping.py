"""Matching the tensors of a checkpoint with those of a model, before anything is loaded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .._torch_compat import buffers_of, non_persistent_buffers, parameters_of
from ..tensors import Location, is_packed

_MAX_NAMES = 40

logger: Final = logging.getLogger(__name__)


@dataclass
class ModelTensor:
    """A parameter or buffer of a model, under all its names (tied weights have several)."""

    name: str  # its first name
    tensor: torch.Tensor  # its current value
    is_buffer: bool  # a buffer rather than a parameter
    # (module, attribute) of each place where the model holds it
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # all its names

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another tensor in all its slots."""
        for owner, key in self.slots:
            (buffers_of(owner) if self.is_buffer else parameters_of(owner))[key] = tensor


def model_tensors(model: nn.Module, with_unsaved: bool = False) -> tuple[list[ModelTensor], list[str]]:
    """Return the tensors of the model's checkpoint, and the names of meta-device buffers that it does not hold.

    Args:
        model: the model.
        with_unsaved: include buffers that checkpoints do not hold.
    """
    tensors: dict[int, ModelTensor] = {}
    unsaved: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        not_saved = non_persistent_buffers(module)
        unsaved += [prefix + key for key, buffer in buffers_of(module).items() if key in not_saved and _is_meta(buffer)]
        for is_buffer, table in ((False, parameters_of(module)), (True, buffers_of(module))):
            for key, tensor in table.items():
                if tensor is not None and (with_unsaved or not (is_buffer and key in not_saved)):
                    entry = tensors.setdefault(id(tensor), ModelTensor(prefix + key, tensor, is_buffer))
                    entry.names.append(prefix + key)
                    entry.slots.append((module, key))
    return list(tensors.values()), unsaved


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "meta"


def split_by_location(
    tensors: Iterable[ModelTensor], location: Callable[[str], Location | None]
) -> tuple[list[ModelTensor], list[list[str]]]:
    """Split tied tensors that go to several locations into one for each; also returns the names of those."""
    result: list[ModelTensor] = []
    split_names: list[list[str]] = []
    for tensor in tensors:
        parts: dict[str, ModelTensor] = {}
        for name, slot in zip(tensor.names, tensor.slots, strict=True):
            part = parts.setdefault(str(location(name)), ModelTensor(name, tensor.tensor, tensor.is_buffer))
            part.names.append(name)
            part.slots.append(slot)
        result += parts.values()
        if len(parts) > 1:
            split_names.append(tensor.names)
    return result, split_names


@dataclass
class CheckpointMatch:
    """How the names and shapes of a checkpoint fit a model."""

    unsaved_buffers: list[str]  # buffers on the meta device that no checkpoint holds
    # the name in the checkpoint of each tensor, by its first name in the model
    sources: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # names in the model that the checkpoint lacks
    without_values: list[str] = field(default_factory=list)  # those of ``missing`` that are on the meta device
    unexpected: list[str] = field(default_factory=list)  # names in the checkpoint that the model lacks
    misshapen: dict[str, str] = field(default_factory=dict)  # descriptions of the differing shapes, by name


def match_checkpoint(
    tensors: Iterable[ModelTensor], shapes: Mapping[str, tuple[int, ...]], unsaved_buffers: list[str]
) -> CheckpointMatch:
    """Compare what :func:`model_tensors` returned with the names and shapes of a checkpoint."""
    match = CheckpointMatch(list(unsaved_buffers))
    known: set[str] = set()
    for tensor in tensors:
        known.update(tensor.names)
        # If a tied weight is stored under several names, the last one counts, as in load_state_dict.
        source = next((name for name in reversed(tensor.names) if name in shapes), None)
        if source is None:
            match.missing.append(tensor.name)
            if _is_meta(tensor.tensor):
                match.without_values.append(tensor.name)
            continue
        match.sources[tensor.name] = source
        stored, expected = tuple(shapes[source]), tuple(tensor.tensor.shape)
        if stored != expected and not is_packed(tensor.tensor):
            match.misshapen[source] = f"{stored} in the checkpoint, {expected} in the model"
    # 8-bit checkpoints store the scales of a weight under this name.
    known |= {f"{name.removesuffix('weight')}SCB" for name in known if name.endswith("weight")}
    match.unexpected = [name for name in shapes if name not in known and not name.endswith("_extra_state")]
    return match


class CheckpointMismatchError(ConfigurationError, RuntimeError):
    """Names or shapes of a checkpoint that do not fit the model."""


def check_match(model: nn.Module, checkpoint: str, match: CheckpointMatch, strict: bool) -> None:
    """Refuse a checkpoint that does not fit the model; warn of harmless differences."""
    faults = []
    if match.misshapen:
        details = [f"{name}: {shapes}" for name, shapes in match.misshapen.items()]
        faults.append(f"misshapen ({len(details)}): {join_names(details)}")
    for kind, names in (("missing", match.missing), ("unexpected", match.unexpected)):
        if names:
            faults.append(f"{kind} ({len(names)}): {join_names(names)}")
    text = f"the checkpoint {checkpoint} does not fit {type(model).__name__}. " + "; ".join(faults)
    if match.misshapen or match.without_values or (strict and faults):
        raise CheckpointMismatchError(f"{text}. Nothing was loaded.")
    if match.unsaved_buffers:
        raise ConfigurationError(
            f"buffers of {type(model).__name__} are on the meta device, and checkpoints do not store them: "
            f"{join_names(match.unsaved_buffers)}. Build the model with init_empty_weights(include_buffers=False), "
            "which keeps the values of buffers, or set them first."
        )
    if match.missing:
        missing = join_names(match.missing)
        warnings.warn(
            f"the checkpoint {checkpoint} does not fit {type(model).__name__}: missing ({len(match.missing)}): "
            f"{missing}. Missing weights keep their values.",
            stacklevel=4,
        )
    if match.unexpected:
        logger.warning(
            "Ignoring %d tensors of the checkpoint %s that %s does not have: %s",
            len(match.unexpected),
            checkpoint,
            type(model).__name__,
            ", ".join(match.unexpected),
        )


def join_names(names: list[str], limit: int = _MAX_NAMES) -> str:
    """Return a list of names for a message, cut at ``limit``."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
