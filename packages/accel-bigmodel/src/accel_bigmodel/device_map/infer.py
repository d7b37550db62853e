"""Finding a device map: fill one device after the other, without splitting modules that must stay whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from accel_state import convert_bytes, convert_file_size_to_int
from accel_state.errors import check_type

from .._torch_compat import children_of
from ..hooks.experts import largest_visit
from ..sizes import Dtype, as_names, direct_members, tensor_bytes
from ..tensors import Location
from .device_map_checks import clean_device_map
from .memory import HOST_AND_DISK, MaxMemory, get_max_memory


@dataclass(eq=False, slots=True)
class PlacementUnit:
    """A module, or a tensor that a split module holds directly; ``parent`` is the unit that contains it."""

    name: str
    member: nn.Module | torch.Tensor
    parent: PlacementUnit | None
    size: int = 0  # bytes of its tensors; tied ones count once
    buffers: int = 0  # bytes of its buffers, part of size
    tied: set[int] = field(default_factory=set)  # the weights that it shares with other units, by id
    children: list[PlacementUnit] = field(default_factory=list)  # the units it can be split into


class PlacementTree:
    """The placement units of a model."""

    def __init__(
        self,
        model: nn.Module,
        no_split: Sequence[str],
        dtype: str | torch.dtype | None,
        special_dtypes: Mapping[str, Dtype] | None,
    ) -> None:
        self._dtype = dtype
        self._special = special_dtypes or {}
        self.root: PlacementUnit = PlacementUnit("", model, None)
        # For each tied weight the unsplittable units that hold it, in the order of the model.
        self.tied_owners: dict[int, list[PlacementUnit]] = {}
        self.tied_sizes: dict[int, int] = {}  # bytes of each tensor, by id
        # A loop instead of recursion: models can be nested more deeply than Python's call stack.
        ordered, pending, classes = [], [self.root], frozenset(no_split)
        holders: dict[int, list[PlacementUnit]] = {}
        while pending:
            unit = pending.pop()
            ordered.append(unit)
            member = unit.member
            is_whole = isinstance(member, _FUSED) or type(member).__name__ in classes
            if isinstance(member, nn.Module) and children_of(member) and not is_whole:
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

    def largest_visit(self, unit: PlacementUnit) -> int:
        """Return bytes of the largest layer of a unit: its layers are on the main device one after the other."""
        if not isinstance(unit.member, nn.Module):
            return unit.size
        prefix = f"{unit.name}." if unit.name else ""
        sizes = {
            name.removeprefix(prefix): tensor_bytes(tensor, self._dtype, self._special.get(name))
            for name, tensor in _tensors(unit)
        }
        return largest_visit(unit.member, sizes)


# Modules of torch that compute with the weights of their submodules, which must be on one device with them.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _tensors(unit: PlacementUnit) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a unit, under each of their names."""
    if isinstance(unit.member, torch.Tensor):
        yield unit.name, unit.member
    elif children_of(unit.member):
        yield from unit.member.named_parameters(unit.name, remove_duplicate=False)
        yield from unit.member.named_buffers(unit.name, remove_duplicate=False)
    else:
        for name, tensor in direct_members(unit.name, unit.member):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor


# Each attempt reserves more memory on the main device; in practice the second or third is the last.
_MAX_ATTEMPTS = 16


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
    skip_too_large: bool = False,
) -> dict[str, Location]:
    """Return a device map that fills the accelerators in their order, then the CPU, then the disk.
    Weights are placed in the order of the model. When the next one does not fit on a device, the next device is filled.
    If anything is offloaded, the main device (the first accelerator, else the CPU) keeps room for the largest offloaded
    layer that it can hold, because offloaded layers run there. Modules with tied weights go to one device. The result
    is deterministic, and the time is proportional to the number of modules.

    Args:
        model: the model, which may be on the meta device.
        max_memory: bytes, or text such as "10GB", by device, as in :func:`get_max_memory`. The disk is unlimited.
        no_split_module_classes: classes whose modules are not split, such as those with a residual connection.
        dtype: the dtype that floating point weights are converted to when loaded.
        special_dtypes: dtypes of single weights by full name.
        verbose: print each decision.
        clean_result: replace the entries of a module's parts by one of the module where they are on one device. Without
            it a model that fits on one device has an entry for each of its direct members instead of "".
        offload_buffers: offload buffers together with the weights. Otherwise the main device reserves room for them.
        fallback_allocation: if the next layer does not fit on an empty device, place a later one that does.
        skip_too_large: offload a layer that is too large for every accelerator, and fill the accelerators with those
            after it, as the named maps ("auto", ...) do. Otherwise everything after it is offloaded too.

    Returns:
        Names of modules (or of tensors that a split module holds directly) and their devices.

    Raises:
        ConfigurationError: invalid limits (see :func:`get_max_memory`).

    Examples:
        >>> layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> infer_auto_device_map(layers, max_memory={"cpu": "50KB", "disk": "1GB"})  # keeps room for a layer
        {'0': 'cpu', '1': 'cpu', '2': 'disk', '3': 'disk'}
    """
    check_type(model, nn.Module, "infer_auto_device_map", "Pass a model: a torch.nn.Module.")
    tree = PlacementTree(model, as_names(no_split_module_classes), dtype, special_dtypes)
    limits = get_max_memory(max_memory)
    main = next((device for device, limit in limits.items() if limit > 0 and device != "disk"), "disk")
    reserved = 0
    for _ in range(_MAX_ATTEMPTS):
        attempt = _Allocation(tree, limits, main, reserved, fallback_allocation, skip_too_large, verbose)
        attempt.run()
        needed = attempt.room_needed(offload_buffers)
        if needed <= reserved:
            break
        reserved = needed
    if not offload_buffers:
        attempt.warn_of_buffers()
    if verbose:
        print("\n".join(attempt.log))
    if clean_result:
        return clean_device_map(attempt.device_map)
    members = [name for name, _ in direct_members("", model)]
    if members and "" in attempt.device_map:
        return dict.fromkeys(members, attempt.device_map[""])
    return attempt.device_map


@dataclass
class _Allocation:
    """One attempt, with ``reserved`` bytes kept free on the main device."""

    tree: PlacementTree
    limits: Mapping[int | str, int]
    main: int | str
    reserved: int
    fallback: bool
    skip_too_large: bool
    verbose: bool
    device_map: dict[str, Location] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices: list[int | str] = [*(device for device in self.limits if device != "disk"), "disk"]
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.position = 0
        self.placed: set[str] = set()
        self.partly_placed: set[str] = set()
        self.tied_devices: dict[int, int | str] = {}
        self.offloaded: list[PlacementUnit] = []

    @property
    def device(self) -> int | str:
        return self.devices[self.position]

    def room(self, device: int | str) -> float:
        """Return bytes left on a device."""
        return self._capacity(device) - self.used[device]

    def _capacity(self, device: int | str) -> float:
        """Return bytes that a device may hold."""
        if device == "disk":
            return float("inf")
        return self.limits[device] - (self.reserved if device == self.main else 0)

    def run(self) -> None:
        pending = [self.tree.root]
        while pending:
            unit = pending.pop()
            if unit.name in self.placed:
                continue
            group = self._tied_group(unit)
            if group is not None and self._cost(group, self.device) <= self.room(self.device):
                self._place(group, self.device)
                continue
            if unit.children:
                pending.extend(reversed(unit.children))
                continue
            is_empty = self.used[self.device] == 0
            if group is not None and self.fallback and is_empty and self._place_later_unit(pending):
                pending.append(unit)
            elif group is not None and self.skip_too_large and self._is_too_large(group):
                self.log.append(f"{unit.name}: {convert_bytes(unit.size)} do not fit on any of the accelerators left")
                host = (device for device in HOST_AND_DISK if device in self.used)
                self._place(group, next(one for one in host if self._cost(group, one) <= self.room(one)))
            else:
                self.log.append(f"{unit.name}: {convert_bytes(unit.size)} do not fit into the rest of {self.device}")
                self.position += 1
                pending.append(unit)

    def _is_too_large(self, group: list[PlacementUnit]) -> bool:
        """Return True if no accelerator from the current one on could hold units if it were empty.

        False on the host.
        """
        accelerators = [device for device in self.devices[self.position :] if device not in HOST_AND_DISK]
        return bool(accelerators) and all(self._cost(group, one) > self._capacity(one) for one in accelerators)

    def _tied_group(self, unit: PlacementUnit) -> list[PlacementUnit] | None:
        """Return the unit and all that are tied to it, directly or not; None if a part of it is placed already."""
        if unit.name in self.partly_placed:
            return None
        group = [unit]
        if not unit.tied:
            return group
        seen = set(self.tied_devices)
        for member in group:  # the loop also visits the units appended below
            for weight in [weight for weight in member.tied if weight not in seen]:
                seen.add(weight)
                for owner in self.tree.tied_owners[weight]:
                    enclosing = (other.name for other in group)
                    if not any(name in ("", owner.name) or owner.name.startswith(f"{name}.") for name in enclosing):
                        group.append(owner)
        return [unit, *sorted(group[1:], key=lambda owner: owner.name)]

    def _cost(self, group: list[PlacementUnit], device: int | str) -> int:
        """Return bytes of several units on a device, tied weights counted once."""
        if len(group) == 1 and not group[0].tied:
            return group[0].size
        counted = {weight for weight, holder in self.tied_devices.items() if holder == device}
        total = 0
        for unit in group:
            total += unit.size - sum(self.tree.tied_sizes[weight] for weight in unit.tied & counted)
            counted |= unit.tied
        return total

    def _place(self, group: list[PlacementUnit], device: int | str) -> None:
        cost = self._cost(group, device)
        self.used[device] += cost
        for unit in group:
            self.device_map[unit.name] = device
            self.placed.add(unit.name)
            self.tied_devices.update(dict.fromkeys(unit.tied, device))
            parent = unit.parent
            while parent is not None and parent.name not in self.partly_placed:
                self.partly_placed.add(parent.name)
                parent = parent.parent
            if device in HOST_AND_DISK and device != self.main:
                self.offloaded.append(unit)
        if self.verbose:
            names = " with ".join(unit.name or "the whole model" for unit in group)
            left = "no limit" if device == "disk" else f"{convert_bytes(self.room(device))} left"
            self.log.append(f"{names}: {convert_bytes(cost)} on {device} ({left})")

    def _place_later_unit(self, pending: list[PlacementUnit]) -> bool:
        """Place the first pending unit that fits on the current device, breadth first."""
        level = [unit for unit in reversed(pending) if unit.name not in self.placed]
        while level:
            for unit in level:
                group = self._tied_group(unit)
                if group is not None and 0 < self._cost(group, self.device) <= self.room(self.device):
                    self._place(group, self.device)
                    return True
            level = [child for unit in level for child in unit.children if child.name not in self.placed]
        return False

    def room_needed(self, offload_buffers: bool) -> int:
        """Return the bytes that the main device needs for offloaded layers: the largest one, and all their buffers."""
        if self.main == "disk":
            return 0
        largest, buffers = self._offloaded_bytes(offload_buffers)
        return min(self.limits[self.main], largest + buffers)

    def warn_of_buffers(self) -> None:
        """Warn if the main device cannot hold the offloaded layers' buffers next to the largest of these layers."""
        if self.main == "disk":
            return
        largest, buffers = self._offloaded_bytes(offload_buffers=False)
        limit, used = self.limits[self.main], self.used[self.main]
        if buffers and used + largest + buffers > limit:
            warnings.warn(
                f"the buffers of the offloaded layers take {convert_bytes(buffers)} on device {self.main}, which do "
                f"not fit next to its weights and the largest offloaded layer ({convert_bytes(used + largest)} of "
                f"{convert_bytes(limit)}). Pass offload_buffers=True to offload them too.",
                stacklevel=3,
            )

    def _offloaded_bytes(self, offload_buffers: bool) -> tuple[int, int]:
        """Return the bytes of the largest offloaded layer that the main device fits, and of buffers that stay there."""
        limit = self.limits[self.main]
        buffers = 0 if offload_buffers else sum(unit.buffers for unit in self.offloaded)
        largest = 0
        pending = list(self.offloaded)
        while pending:
            unit = pending.pop()
            pending.extend(unit.children)
            size = unit.size if offload_buffers else unit.size - unit.buffers
            if not unit.children and size > limit:
                size = self.tree.largest_visit(unit)
            if not unit.children and size <= limit:
                largest = max(largest, size)
        return largest, buffers


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: Sequence[str] | str | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """Find a module that fits, breadth first, and remove it from the list.

    Args:
        modules: full names and modules to choose from.
        module_sizes: bytes by full name, from :func:`compute_module_sizes`.
        size_limit: bytes, or text such as "5GB".
        no_split_module_classes: classes whose modules are not split.
        tied_parameters: groups of names of tied weights; modules that hold one of them are not chosen.

    Returns:
        Name and module that fit (None, None if none does), and the list without it: a module that contained it is
        replaced by its other children.
    """
    limit, no_split = convert_file_size_to_int(size_limit), as_names(no_split_module_classes)
    tied = [name for group in tied_parameters or [] for name in group]
    rest: list[tuple[str, nn.Module]] = list(modules)
    level = list(modules)
    while level:
        below: list[tuple[str, nn.Module]] = []
        for name, module in level:
            holds_tied = any(weight == name or weight.startswith(f"{name}.") for weight in tied)
            if module_sizes.get(name, 0) <= limit and not holds_tied:
                return name, module, _without(rest, name)
            if isinstance(module, nn.Module) and type(module).__name__ not in no_split:
                below += _named_children(name, module)
        level = below
    return None, None, rest


def _named_children(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]


def _without(modules: list[tuple[str, nn.Module]], removed: str) -> list[tuple[str, nn.Module]]:
    """Return the list without a module that is in it, or inside one of its members."""
    rest: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        if name != "" and name != removed and not removed.startswith(f"{name}."):
            rest.append((name, module))
        elif name != removed:
            rest += _without(_named_children(name, module), removed)
    return rest
