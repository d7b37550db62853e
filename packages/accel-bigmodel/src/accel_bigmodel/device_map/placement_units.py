"""The parts of a model that are placed on a device as a whole, with their sizes and tied weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from .._torch_compat import children_of
from ..offload.parent_read_params import reads_child_params
from ..sizes import Dtype, direct_members, tensor_bytes


class PlacementUnit:
    """A module, or a tensor that a split module holds directly.

    Attributes:
        name: full name.
        member: the module or tensor.
        parent: the unit that directly contains this one.
        size: bytes of its tensors; tied ones count once.
        buffers: bytes of its buffers, part of ``size``.
        tied: the weights that it shares with other units, by id.
        children: the units it can be split into; empty if it cannot be split.
    """

    __slots__ = ("buffers", "children", "member", "name", "parent", "size", "tied")

    def __init__(self, name: str, member: nn.Module | torch.Tensor, parent: PlacementUnit | None) -> None:
        self.name = name
        self.member = member
        self.parent = parent
        self.size = 0
        self.buffers = 0
        self.tied: set[int] = set()
        self.children: list[PlacementUnit] = []


class PlacementTree:
    """The placement units of a model.

    Attributes:
        root: the whole model.
        tied_sizes: bytes of each tensor, by id; used for tied ones.
        tied_owners: for each tied weight the unsplittable units that hold it, in the order of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        no_split: Sequence[str],
        dtype: str | torch.dtype | None,
        special_dtypes: Mapping[str, Dtype] | None,
    ) -> None:
        self._dtype = dtype
        self._special = special_dtypes or {}
        self.root = PlacementUnit("", model, None)
        self.tied_owners: dict[int, list[PlacementUnit]] = {}
        self.tied_sizes: dict[int, int] = {}
        # A loop instead of recursion: models can be nested more deeply than Python's call stack.
        ordered, pending, classes = [], [self.root], frozenset(no_split)
        holders: dict[int, list[PlacementUnit]] = {}
        while pending:
            unit = pending.pop()
            ordered.append(unit)
            member = unit.member
            if isinstance(member, nn.Module) and children_of(member) and not reads_child_params(member, classes):
                unit.children = [PlacementUnit(name, part, unit) for name, part in direct_members(unit.name, member)]
                pending.extend(reversed(unit.children))
            else:
                self._measure(unit, holders)
        for weight, units in holders.items():
            if len(units) > 1:
                self.tied_owners[weight] = units
                for unit in units:
                    unit.tied.add(weight)
        for unit in reversed(ordered):
            for child in unit.children:
                unit.size += child.size
                unit.buffers += child.buffers
                if child.tied:
                    unit.size -= sum(self.tied_sizes[weight] for weight in unit.tied & child.tied)
                    unit.tied |= child.tied

    def _measure(self, unit: PlacementUnit, holders: dict[int, list[PlacementUnit]]) -> None:
        seen: set[int] = set()
        for name, tensor in _tensors(unit):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            size = tensor_bytes(tensor, self._dtype, self._special.get(name))
            unit.size += size
            if not isinstance(tensor, nn.Parameter):
                unit.buffers += size
            holders.setdefault(id(tensor), []).append(unit)
            self.tied_sizes[id(tensor)] = size


def _tensors(unit: PlacementUnit) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a unit, under each of their names."""
    if isinstance(unit.member, torch.Tensor):
        yield unit.name, unit.member
    elif children_of(unit.member):
        yield from unit.member.named_parameters(unit.name, remove_duplicate=False)
        yield from unit.member.named_buffers(unit.name, remove_duplicate=False)
    else:
        for name, tensor in direct_members(unit.name, unit.member):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor
