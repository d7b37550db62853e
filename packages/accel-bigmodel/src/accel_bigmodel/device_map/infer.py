"""Finding a device map: fill the first device, then the next, and never cut what must stay whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from accel_state import convert_bytes

from ..sizes import Dtype, as_names
from ..tensors import Location
from .device_map_checks import clean_device_map
from .memory import HOST_AND_DISK, MaxMemory, get_max_memory
from .placement_units import Layout, Unit

# Each attempt reserves more on the main device; the second or third is the last one in practice.
_ATTEMPTS = 16


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Location]:
    """A device map that fills the accelerators in their order, then the CPU, then the disk.

    Weights are placed in the order of the model. When the next one does not fit on a device, the device is done and the
    next one is filled. Where something is offloaded, the main device (the first accelerator, else the CPU) keeps room
    for the largest offloaded layer that it can hold at all, because offloaded layers visit it to be computed. Modules
    that share a weight go to one device. The same arguments give the same map. Takes time in proportion to the number
    of modules.

    Args:
        model: the model, on the meta device too.
        max_memory: as in :func:`get_max_memory`. The disk has no limit.
        no_split_module_classes: classes whose modules must stay whole, such as those with a residual connection.
        dtype: the type that floating point weights are converted to when loaded.
        special_dtypes: types of single weights by full name.
        verbose: print each decision.
        clean_result: name a module instead of all its parts where they are on one device.
        offload_buffers: buffers are offloaded together with the weights. Otherwise the main device needs room for them
            too.
        fallback_allocation: where the next layer does not fit on a device that is still empty, look for a later one
            that does.

    Returns:
        Names of modules (or of tensors that a split module holds directly) and their devices.

    Raises:
        ConfigurationError: wrong limits (see :func:`get_max_memory`).
    """
    layout = Layout(model, as_names(no_split_module_classes), dtype, special_dtypes)
    limits = get_max_memory(max_memory)
    main = next((device for device, limit in limits.items() if limit > 0 and device != "disk"), "disk")
    reserve = 0
    for _ in range(_ATTEMPTS):
        filling = _Filling(layout, limits, main, reserve, fallback_allocation, verbose)
        filling.run()
        needed = filling.room_needed(offload_buffers)
        if needed <= reserve:
            break
        reserve = needed
    if verbose:
        print("\n".join(filling.story))
    return clean_device_map(filling.device_map) if clean_result else filling.device_map


@dataclass
class _Filling:
    """One attempt, with so many bytes kept free on the main device."""

    layout: Layout
    limits: Mapping[int | str, int]
    main: int | str
    reserve: int
    fallback: bool
    verbose: bool
    device_map: dict[str, Location] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices: list[int | str] = [*(device for device in self.limits if device != "disk"), "disk"]
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.position = 0
        self.placed: set[str] = set()
        self.touched: set[str] = set()
        self.where_shared: dict[int, int | str] = {}
        self.offloaded: list[Unit] = []

    @property
    def device(self) -> int | str:
        return self.devices[self.position]

    def room(self) -> float:
        """Bytes that may still go to the current device."""
        if self.device == "disk":
            return float("inf")
        return self.limits[self.device] - self.used[self.device] - (self.reserve if self.device == self.main else 0)

    def run(self) -> None:
        pending = [self.layout.root]
        while pending:
            unit = pending.pop()
            if unit.name in self.placed:
                continue
            together = self._together(unit)
            if together is not None and self._cost(together) <= self.room():
                self._place(together)
            elif unit.children:
                pending.extend(reversed(unit.children))
            elif together is None or not (
                self.fallback and self.used[self.device] == 0 and self._place_another(pending)
            ):
                pending.append(unit)
                self.story.append(f"{unit.name}: {convert_bytes(unit.size)} do not fit into the rest of {self.device}")
                self.position += 1
            else:
                pending.append(unit)

    def _together(self, unit: Unit) -> list[Unit] | None:
        """The unit and those that share weights with it, or None where a part of it is placed already."""
        if unit.name in self.touched:
            return None
        together = [unit]
        if not unit.shared:
            return together
        seen = set(self.where_shared)
        for member in together:  # which grows
            for weight in [weight for weight in member.shared if weight not in seen]:
                seen.add(weight)
                together += [
                    owner
                    for owner in self.layout.owners[weight]
                    if not any(_is_inside(owner, other) for other in together)
                ]
        return [unit, *sorted(together[1:], key=lambda owner: owner.name)]

    def _cost(self, together: list[Unit]) -> int:
        """Bytes of several units, with what they share counted once."""
        if len(together) == 1 and not together[0].shared:
            return together[0].size
        counted: set[int] = {weight for weight, device in self.where_shared.items() if device == self.device}
        total = 0
        for unit in together:
            total += unit.size - sum(self.layout.sizes_of_shared[weight] for weight in unit.shared & counted)
            counted |= unit.shared
        return total

    def _place(self, together: list[Unit]) -> None:
        cost = self._cost(together)
        self.used[self.device] += cost
        for unit in together:
            self.device_map[unit.name] = self.device
            self.placed.add(unit.name)
            self.where_shared.update(dict.fromkeys(unit.shared, self.device))
            around = unit.parent
            while around is not None and around.name not in self.touched:
                self.touched.add(around.name)
                around = around.parent
            if self.device in HOST_AND_DISK and self.device != self.main:
                self.offloaded.append(unit)
        if self.verbose:
            names = " with ".join(unit.name or "the whole model" for unit in together)
            self.story.append(f"{names}: {convert_bytes(cost)} on {self.device}, which has {self._left()} left")

    def _left(self) -> str:
        room = self.room()
        return "any amount" if room == float("inf") else convert_bytes(room)

    def _place_another(self, pending: list[Unit]) -> bool:
        """Put the first unit that fits on the current device, breadth first among all that wait."""
        level = [unit for unit in reversed(pending) if unit.name not in self.placed]
        while level:
            for unit in level:
                together = self._together(unit)
                if together is not None and 0 < self._cost(together) <= self.room():
                    self._place(together)
                    return True
            level = [child for unit in level for child in unit.children if child.name not in self.placed]
        return False

    def room_needed(self, offload_buffers: bool) -> int:
        """Bytes that the main device needs for offloaded layers: the largest that it can hold at all, and all their
        buffers.
        """
        if self.main == "disk":
            return 0
        limit = self.limits[self.main]
        buffers = 0 if offload_buffers else sum(unit.buffers for unit in self.offloaded)
        sizes = (size for unit in self.offloaded for size in _layer_sizes(unit, offload_buffers))
        largest = max((size for size in sizes if size <= limit), default=0)
        return min(limit, largest + buffers)


def _is_inside(unit: Unit, other: Unit) -> bool:
    return other.name == "" or unit.name == other.name or unit.name.startswith(f"{other.name}.")


def _layer_sizes(unit: Unit, with_buffers: bool) -> Iterator[int]:
    """Bytes that visit the main device together: of each unit inside a unit that cannot be split."""
    pending = [unit]
    while pending:
        here = pending.pop()
        if here.children:
            pending.extend(here.children)
        else:
            yield here.size if with_buffers else here.size - here.buffers


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | str | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """Find a module that fits, breadth first, and take it out of the list.

    Args:
        modules: full names and modules to choose from.
        module_sizes: bytes by full name, from :func:`compute_module_sizes`.
        size_limit: bytes, or text such as "5GB".
        no_split_module_classes: classes whose modules must stay whole.
        tied_parameters: groups of names of shared weights; modules that hold one of them are not chosen.

    Returns:
        Name and module that fit (None, None where none does), and the list without it: its siblings stand there in
        place of the module that it was taken out of.
    """
    from accel_state import convert_file_size_to_int

    limit, whole = convert_file_size_to_int(size_limit), as_names(no_split_module_classes)
    tied = [name for group in tied_parameters or [] for name in group]
    rest: list[tuple[str, nn.Module]] = list(modules)
    level = list(modules)
    while level:
        below: list[tuple[str, nn.Module]] = []
        for name, module in level:
            holds_tied = any(weight == name or weight.startswith(f"{name}.") for weight in tied)
            if module_sizes.get(name, 0) <= limit and not holds_tied:
                return name, module, _without(rest, name)
            if isinstance(module, nn.Module) and type(module).__name__ not in whole:
                below += [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        level = below
    return None, None, rest


def _without(modules: list[tuple[str, nn.Module]], name: str) -> list[tuple[str, nn.Module]]:
    """The list without a module, which is in it or inside one of its members."""
    rest: list[tuple[str, nn.Module]] = []
    for own, module in modules:
        if name == own:
            continue
        if own == "" or name.startswith(f"{own}."):
            children = [(f"{own}.{key}" if own else key, child) for key, child in module.named_children()]
            rest += _without(children, name)
        else:
            rest.append((own, module))
    return rest
