"""Nested states with sharded tensors: all ranks write and read these, and the main process writes everything else.

model.bin              the state, with a reference in the place of each sharded tensor
model/.metadata        the sharded tensors, in the format of torch.distributed.checkpoint
model/__0_0.distcp
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_state.collectives.single import Collectives

from ..names import CheckpointError
from ..parts import Part
from .reader import read_shards
from .specs import regions
from .writer import shard_state

Place = tuple[Any, ...]
"""The keys and indices that lead to a value."""

_REFERENCE = "accel_checkpoint.sharded"
_ROOT = "state"


class SplitState:
    """A nested state without its sharded tensors.

    Args:
        content: dictionaries, lists and tuples of tensors and values.

    Attributes:
        tensors: the sharded tensors, by the names that they have in files.
        places: where they are in the state.
        rest: the state with references instead.
    """

    def __init__(self, content: Any) -> None:
        self.tensors: dict[str, DTensor] = {}
        self.places: dict[Place, str] = {}
        self.rest: Any = _replaced(content, self._take)

    def _take(self, place: Place, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        name = ".".join(map(str, place)) or _ROOT
        while name in self.tensors:  # keys with dots
            name += "'"
        self.tensors[name], self.places[place] = value, name
        return {_REFERENCE: name}

    def digest(self) -> str:
        """Return what is equal on ranks that have sharded tensors of the same names."""
        return hashlib.blake2b(repr(list(self.tensors)).encode(), digest_size=8).hexdigest()

    def parts(self, name: str, collectives: Collectives) -> tuple[list[Part], Callable[[Path], None]]:
        """Return the files of this rank, and what writes the metadata; see :func:`.writer.shard_state`."""
        parts, finalize = shard_state({_ROOT: self.tensors}, name, collectives)
        return [Part(f"{name}.bin", self.rest, name), *parts], finalize


def joined(content: Any, directory: Path | None, target: Any, device: torch.device) -> Any:
    """Return a nested state whose tensors are sharded as those of the object that loads it.

    Args:
        content: the state as it was saved: whole, or with references to sharded tensors.
        directory: of the sharded tensors; None if there are none.
        target: the object that loads it; None for full tensors.
        device: where to read full tensors to.
    """
    layout = _layout_of(target)
    places: dict[str, Place] = {}

    def note(place: Place, value: Any) -> Any:
        if isinstance(value, Mapping):
            places[value[_REFERENCE]] = place
        return value

    def like(path: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if path[0] not in places:
            return None
        known = layout(places[path[0]])
        if known is None or known.shape != size:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.empty_like(known, dtype=dtype, requires_grad=False)

    def value_at(place: Place, value: Any) -> Any:
        if isinstance(value, Mapping):
            name = value[_REFERENCE]
            if name not in tensors:
                raise CheckpointError(
                    f"{directory} lacks {name}, which the state refers to. Choose another checkpoint."
                )
            return tensors[name]
        known = layout(place)
        return value if known is None or known.shape != value.shape else _part_of(value, known)

    _replaced(content, note)
    tensors = {} if directory is None else read_shards(directory, like, _ROOT)
    return _replaced(content, value_at)


def _part_of(full: torch.Tensor, known: DTensor) -> torch.Tensor:
    """Return a full tensor as a sharded one like another, without communication."""
    part = torch.empty_like(known, dtype=full.dtype, requires_grad=False)
    for begin, own in regions(part):
        own.copy_(full[tuple(slice(first, first + size) for first, size in zip(begin, own.shape, strict=True))])
    return part


def _layout_of(target: Any) -> Callable[[Place], DTensor | None]:
    """Find the sharded tensor that an object has, or will have, in a place of its state."""
    if isinstance(target, Optimizer):
        # An optimizer that has taken no step has no state yet, which will be sharded like the parameters.
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]

        def of_parameter(place: Place) -> DTensor | None:
            is_known = len(place) == 3 and place[0] == "state" and place[1] in range(len(parameters))
            parameter = parameters[place[1]] if is_known else None
            return parameter if isinstance(parameter, DTensor) else None

        return of_parameter
    if not hasattr(target, "state_dict"):
        return lambda place: None
    split = SplitState(target.state_dict())
    return lambda place: split.tensors[split.places[place]] if place in split.places else None


def _replaced(value: Any, replace: Callable[[Place, Any], Any], place: Place = ()) -> Any:
    """Return a copy of a nested state, with every tensor and every reference replaced."""
    if isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and value.keys() == {_REFERENCE}):
        return replace(place, value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, replace, (*place, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, replace, (*place, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value
