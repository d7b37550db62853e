"""The names and layouts that Transformers changes when it loads a checkpoint.

Transformers 5 stores many models under other names than their modules have, and some tensors split or merged: the
experts of a layer of Mixtral are stored one by one and held as one tensor. ``from_pretrained`` converts them by the
weight mapping of the model's class; this module asks Transformers for that mapping and applies it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .safetensors_file import SafetensorsFile
from .tensor_files import CheckpointFile


@dataclass
class Conversion:
    """A checkpoint as Transformers names it for a model."""

    files: dict[str, CheckpointFile | ConvertedFile]  # the file of each tensor, by its name in the model
    stored_names: dict[str, str]  # its name in the file, except of converted tensors
    converted: list[ConvertedFile]  # those of the files that are computed from others


@dataclass
class ConvertedFile:
    """Tensors of a model that Transformers computes from stored ones, with the methods of a file of weights.

    Attributes:
        sources: the stored tensors that it needs, by the pattern of the weight mapping that they match.
        converter: the entry of the weight mapping.
        target: the name in the model of its first result.
        model: the model, which some conversions ask for shapes and its configuration.
    """

    converter: Any
    target: str
    model: nn.Module
    sources: dict[str, list[tuple[CheckpointFile, str]]] = field(default_factory=dict)

    in_place = False

    @property
    def path(self) -> Path:
        """The file of its first source."""
        return next(iter(self.sources.values()))[0][0].path

    def _convert(self, read: Callable[[CheckpointFile, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        # Each run requires an instance of its own, because the converter collects tensors in itself.
        converter: Any = copy.deepcopy(self.converter)
        for pattern, stored in self.sources.items():
            for file, name in stored:
                converter.add_tensor(self.target, name, pattern, read(file, name))
        try:
            converted = converter.convert(self.target, model=self.model, config=self.model.config)
        except Exception as error:  # the operations of Transformers raise whatever torch raises
            names = [name for stored in self.sources.values() for _, name in stored]
            raise ConfigurationError(
                f"Transformers computes {self.target} of {type(self.model).__name__} from {len(names)} stored tensors "
                f"({', '.join(names[:4])}, ...), and this failed: {error}. The checkpoint may be incomplete; otherwise "
                "load it with from_pretrained(..., device_map=...)."
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @cached_property
    def results(self) -> dict[str, torch.Tensor]:
        """The tensors without values."""
        # Conversions stack, concatenate, split and permute, which tensors on the meta device do without reading.
        return self._convert(lambda file, name: torch.empty(file.shape(name), dtype=file.dtype(name), device="meta"))

    def names(self) -> list[str]:
        return list(self.results)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.results[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.results[name].dtype

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        wanted = list(names)
        if not wanted:
            return {}
        converted = self._convert(lambda file, name: file.tensors([name])[name])
        return {name: converted[name] for name in wanted}

    def expert_stack(self, name: str) -> ExpertStack | None:
        """Return the result as a stack of stored tensors, which is read without converting.

        None if it is anything else.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        operations = list(self.converter.operations)
        is_stack = [type(operation) for operation in operations] in ([MergeModulelist], [MergeModulelist, Concatenate])
        if not is_stack or operations[0].dim != 0 or list(self.results) != [name]:
            return None
        parts: list[list[tuple[SafetensorsFile, str]]] = []
        for pattern in self.converter.source_patterns:  # their order is that of the concatenation
            stored = self.sources.get(pattern, [])
            if not all(isinstance(file, SafetensorsFile) for file, _ in stored):
                return None
            parts.append([(file, name) for file, name in stored if isinstance(file, SafetensorsFile)])
        if len({len(part) for part in parts}) != 1:
            return None
        dim = operations[1].dim - 1 if len(operations) == 2 else 0
        return ExpertStack(parts, dim)


@dataclass(frozen=True)
class ExpertStack:
    """A tensor of all experts of a layer whose parts are stored one by one in safetensors files.

    Attributes:
        parts: (file, name) of each expert's tensor, for each of the tensors that are concatenated.
        dim: the dimension of one expert along which they are concatenated.
    """

    parts: list[list[tuple[SafetensorsFile, str]]]
    dim: int

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.parts[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all experts."""
        shapes = [file.shape(name) for file, name in (part[0] for part in self.parts)]
        shape = list(shapes[0])
        shape[self.dim] = sum(one[self.dim] for one in shapes)
        return self.experts, *shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored tensors."""
        file, name = self.parts[0][0]
        return file.dtype(name)

    def of_expert(self, expert: int) -> list[tuple[SafetensorsFile, str]]:
        """(file, name) of the tensors of one expert."""
        return [part[expert] for part in self.parts]

    def read(self) -> torch.Tensor:
        """Return all experts."""
        stacked = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(self.experts):
            start = 0
            for file, name in self.of_expert(expert):
                value = file.tensors((name,), read_now=True)[name]
                stacked[expert].narrow(self.dim, start, value.shape[self.dim]).copy_(value)
                start += value.shape[self.dim]
        return stacked


def is_transformers_model(model: nn.Module) -> bool:
    """Return True if a model is one of Transformers; without importing it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def conversion_of(model: nn.Module, files: Mapping[str, CheckpointFile]) -> Conversion | None:
    """Return how Transformers converts a checkpoint for a model.

    Args:
        model: any model.
        files: the file of each stored tensor by its stored name.

    Returns:
        None if the model is not one of Transformers, or of a version before 5, which has no weight mapping.
    """
    if not is_transformers_model(model):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None
    transformer: Any = model
    mapping = get_model_conversion_mapping(transformer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(keep_vars=True), transformer.base_model_prefix
    conversion = Conversion({}, {}, [])
    groups: dict[str, ConvertedFile] = {}
    for stored in sorted(files, key=_natural_order):  # an expert's place in the stack is that of its name
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = stored, None
        if pattern is None:
            if name not in state or (name != stored and name in conversion.files):
                name = stored  # unexpected
            conversion.files[name] = files[stored]
            conversion.stored_names[name] = stored
        elif name in state:
            group = groups.setdefault(name, ConvertedFile(converter_of[pattern], name, model))
            group.sources.setdefault(pattern, []).append((files[stored], stored))
        else:
            conversion.files[stored] = files[stored]  # unexpected: listed under the name that a user can look up
    for group in groups.values():
        conversion.converted.append(group)
        conversion.files.update(dict.fromkeys(group.names(), group))
    return conversion


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in names by value."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]
