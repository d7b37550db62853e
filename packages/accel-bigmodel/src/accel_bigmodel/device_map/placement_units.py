"""What can be placed on a device as a whole, and what it brings with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ..offload.parent_read_params import borrows
from ..sizes import Dtype, parts, tensor_bytes


class Unit:
    """A module, or a tensor that a module which was split holds directly.

    Attributes:
        name: full name.
        part: the module or tensor.
        parent: the unit that this one is a direct part of.
        size: bytes of what is in it; what is in it several times counts once.
        buffers: the part of ``size`` that is buffers.
        shared: the weights in it that other units have too, by identity.
        children: what it can be split into; empty where it must stay whole.
    """

    __slots__ = ("buffers", "children", "name", "parent", "part", "shared", "size")

    def __init__(self, name: str, part: nn.Module | torch.Tensor, parent: Unit | None) -> None:
        self.name = name
        self.part = part
        self.parent = parent
        self.size = 0
        self.buffers = 0
        self.shared: set[int] = set()
        self.children: list[Unit] = []


class Layout:
    """The units of a model, as a tree.

    Args:
        model: the model.
        whole: names of classes whose modules must stay whole.
        dtype: the type that weights are converted to.
        special_dtypes: types of single weights.

    Attributes:
        root: the whole model.
        sizes_of_shared: bytes of each shared weight, by identity.
        owners: for each shared weight the units that cannot be split and have it, in the order of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: Sequence[str],
        dtype: str | torch.dtype | None,
        special_dtypes: Mapping[str, Dtype] | None,
    ) -> None:
        self._whole = frozenset(whole)
        self._dtype = dtype
        self._special = special_dtypes or {}
        self.root = Unit("", model, None)
        self.owners: dict[int, list[Unit]] = {}
        self.sizes_of_shared: dict[int, int] = {}
        order = self._split(self.root)
        for unit in reversed(order):
            self._sum_up(unit)

    def _split(self, root: Unit) -> list[Unit]:
        """Build the tree, and fill in its leaves. Models may be nested more deeply than Python's call stack."""
        order, pending = [], [root]
        holders: dict[int, list[Unit]] = {}
        while pending:
            unit = pending.pop()
            order.append(unit)
            part = unit.part
            if isinstance(part, nn.Module) and part._modules and not borrows(part, self._whole):
                unit.children = [Unit(name, child, unit) for name, child in parts(unit.name, part)]
                pending.extend(reversed(unit.children))
            else:
                self._fill(unit, holders)
        for weight, units in holders.items():
            if len(units) > 1:
                self.owners[weight] = units
                for unit in units:
                    unit.shared.add(weight)
        return order

    def _fill(self, unit: Unit, holders: dict[int, list[Unit]]) -> None:
        seen: set[int] = set()
        for name, tensor in _tensors(unit):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            size = tensor_bytes(tensor, self._dtype, self._special.get(name) if self._special else None)
            unit.size += size
            if not isinstance(tensor, nn.Parameter):
                unit.buffers += size
            holders.setdefault(id(tensor), []).append(unit)
            self.sizes_of_shared[id(tensor)] = size

    def _sum_up(self, unit: Unit) -> None:
        for child in unit.children:
            unit.size += child.size
            unit.buffers += child.buffers
            if child.shared:
                unit.size -= sum(self.sizes_of_shared[weight] for weight in unit.shared & child.shared)
                unit.shared |= child.shared


def _tensors(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a unit with its full name, under each of its names."""
    if isinstance(unit.part, torch.Tensor):
        yield unit.name, unit.part
    elif not unit.part._modules:
        for name, tensor in parts(unit.name, unit.part):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor
    else:
        yield from unit.part.named_parameters(unit.name, remove_duplicate=False)
        yield from unit.part.named_buffers(unit.name, remove_duplicate=False)
