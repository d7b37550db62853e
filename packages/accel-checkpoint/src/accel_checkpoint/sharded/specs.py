"""Which rank writes which part of a sharded state, from what each rank knows of its own tensors.

A DTensor says on every rank of its mesh where the parts of all ranks are: shape, mesh and placements. So each rank
finds out what it writes without being told the plans of the others, and rank 0 finds out what everybody writes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from .._torch_compat import local_shape_and_offset

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and its size."""


@dataclass(frozen=True)
class Spec:
    """Where the parts of a tensor are."""

    shape: tuple[int, ...]  # as it is saved
    dtype: torch.dtype
    mesh: tuple[int, ...] = ()  # sizes of the axes of its mesh; () for a tensor that each rank has in full
    ranks: tuple[int, ...] = ()  # of the mesh, in row-major order
    placements: tuple[Any, ...] = ()  # one for each axis
    held: tuple[int, ...] = ()  # the shape that the placements are about, which may have a dimension more
    coordinate: tuple[int, ...] | None = None  # of this rank in the mesh
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def own_boxes(self, turn: int) -> list[Box]:
        """Return the parts that this rank writes, whatever the number of ranks.

        ``turn`` is the number of the tensor.
        """
        if self.coordinate is None or self._writer_of(self.coordinate, turn) != self.coordinate:
            return []
        return self._boxes_at(self.coordinate)

    def all_boxes(self, turn: int, known: dict[Any, list[Any]]) -> list[tuple[Box, int]]:
        """Return every part, and the rank that writes it.

        ``known`` keeps what tensors of the same layout have in common.
        """
        key = self.shape, self.held, self.mesh, self.placements, id(self.ranks)
        if key not in known:
            axes = [
                range(size if splits(placement) else 1)
                for size, placement in zip(self.mesh, self.placements, strict=True)
            ]
            known[key] = [(at, self._boxes_at(at)) for at in itertools.product(*axes)]
            if all(map(splits, self.placements)):  # without copies there is one possible writer
                known[key] = [(box, self._rank_at(at)) for at, boxes in known[key] for box in boxes]
        if all(map(splits, self.placements)):
            parts = known[key]
        else:
            writers = [(self._rank_at(self._writer_of(at, turn)), boxes) for at, boxes in known[key]]
            parts = [(box, rank) for rank, boxes in writers for box in boxes]
        # A tensor without elements is written once nevertheless.
        return parts or [(((0,) * len(self.shape), self.shape), self.ranks[0])]

    def _writer_of(self, coordinate: Sequence[int], turn: int) -> tuple[int, ...]:
        """Return the coordinate of the rank that writes the part at a coordinate: holders of copies take turns."""
        writer = list(coordinate)
        copies = []
        for axis, placement in enumerate(self.placements):
            if splits(placement):
                turn += coordinate[axis]
            else:
                copies.append(axis)
        for axis in copies:
            turn, writer[axis] = divmod(turn, self.mesh[axis])
        return tuple(writer)

    def _rank_at(self, coordinate: Sequence[int]) -> int:
        position = 0
        for size, index in zip(self.mesh, coordinate, strict=True):
            position = position * size + index
        return self.ranks[position]

    def _boxes_at(self, coordinate: Sequence[int]) -> list[Box]:
        size, offset = local_shape_and_offset(self.held, self.mesh, coordinate, self.placements)
        return [box for box in split_box(self.held, self.shape, (offset, size)) if 0 not in box[1]]


def splits(placement: Any) -> bool:
    """Return True if a placement divides a dimension, evenly or with a stride."""
    return hasattr(placement, "dim")


def split_box(held: Sequence[int], saved: Sequence[int], box: Box) -> list[Box]:
    """Return the parts of a saved tensor that a part of the held one is.

    Args:
        held: the shape that is sharded: that of the saved tensor, or one with one of its dimensions split in two.
        saved: the shape of the saved tensor.
        box: a part of the held tensor.
    """
    if len(held) == len(saved):
        return [box]
    begin, size = box
    dim = split_dim(held, saved)
    boxes = []
    for index in range(size[dim]):
        row = (begin[dim] + index) * held[dim + 1] + begin[dim + 1]
        boxes.append(((*begin[:dim], row, *begin[dim + 2 :]), (*size[:dim], *size[dim + 1 :])))
    return boxes


def split_dim(held: Sequence[int], saved: Sequence[int]) -> int:
    """Return the dimension of the saved shape that the held one has split in two."""
    return next(dim for dim in range(len(saved)) if math.prod(held[: dim + 2]) == math.prod(saved[: dim + 1]))


def sharded_tensor(value: Any) -> DTensor | None:
    """Return the DTensor of a value: itself, or the one that it saves in another shape; None for other values."""
    inner = value if isinstance(value, DTensor) else getattr(value, "tensor", None)
    return inner if isinstance(inner, DTensor) else None


def regions(value: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return this rank's parts of a tensor, and where they begin in the full one."""
    sharded = sharded_tensor(value)
    if sharded is None:
        return [((0,) * value.ndim, value.detach())]
    part = cast("DTensor", sharded.detach()).to_local()
    coordinate = sharded.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    held, mesh = tuple(sharded.shape), tuple(sharded.device_mesh.shape)
    size, offset = local_shape_and_offset(held, mesh, coordinate, sharded.placements)
    if tuple(part.shape) != size:
        raise ValueError(f"the part of a tensor of shape {held} has shape {tuple(part.shape)} instead of {size}")
    boxes = split_box(held, tuple(value.shape), (offset, size))
    if len(held) == value.ndim:
        return [(offset, part)]
    dim = split_dim(held, tuple(value.shape))
    return [(begin, part.select(dim, index)) for index, (begin, _) in enumerate(boxes)]


class Specs:
    """Makes the specifications of tensors, and the fingerprint of a state."""

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, bytes]] = {}
        self._placements: dict[tuple[Any, ...], bytes] = {}

    def of(self, value: torch.Tensor) -> Spec:
        """Return the specification of a tensor."""
        shape = tuple(value.shape)
        sharded = sharded_tensor(value)
        if sharded is None:
            return Spec(shape, value.dtype, requires_grad=value.requires_grad)
        for placement in sharded.placements:
            if placement.is_partial():
                raise ValueError(f"a tensor of shape {shape} has unreduced parts ({placement}) and cannot be saved")
        _, mesh, ranks, coordinate, _ = self._mesh(sharded)
        return Spec(
            shape=shape,
            dtype=value.dtype,
            mesh=mesh,
            ranks=ranks,
            placements=tuple(sharded.placements),
            held=tuple(sharded.shape),
            coordinate=coordinate,
            requires_grad=value.requires_grad,
        )

    def fingerprint(self, flat: Mapping[str, Any]) -> bytes:
        """32 bytes, equal on ranks whose states have the same names, types, shapes and placements."""
        digest = hashlib.blake2b(digest_size=32)
        for name, value in flat.items():
            digest.update(name.encode())
            if not isinstance(value, torch.Tensor):
                digest.update(b"\0value\0")
                continue
            digest.update(f"\0{tuple(value.shape)}{value.dtype}{value.requires_grad}\0".encode())
            sharded = sharded_tensor(value)
            if sharded is not None:
                key = tuple(sharded.placements)
                if key not in self._placements:
                    self._placements[key] = repr(key).encode()
                digest.update(self._placements[key] + repr(tuple(sharded.shape)).encode() + self._mesh(sharded)[-1])
        return digest.digest()

    def _mesh(self, sharded: DTensor) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, bytes]:
        mesh = sharded.device_mesh
        if id(mesh) not in self._meshes:
            coordinate = mesh.get_coordinate()
            ranks, shape = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape)
            digest = hashlib.blake2b(repr((shape, ranks)).encode(), digest_size=16).digest()
            # The mesh is kept, so that its id stays its own.
            self._meshes[id(mesh)] = mesh, shape, ranks, None if coordinate is None else tuple(coordinate), digest
        return self._meshes[id(mesh)]


@dataclass(frozen=True)
class Structure:
    """What ranks hold together: of each name one specification, since each describes the full tensor."""

    specs: Mapping[str, Spec]  # in an order that all ranks agree on
    values: tuple[str, ...]  # names of what is not a tensor, in the same order
    full_writers: Mapping[str, int]  # the rank that writes a tensor that ranks have in full
    # the nested state's path of each name, for the metadata
    paths: Mapping[str, tuple[Any, ...]]

    def own(self, rank: int) -> Iterator[tuple[str, list[Box]]]:
        """Yield what a rank writes, in the order in which it writes it."""
        for turn, (name, spec) in enumerate(self.specs.items()):
            if not spec.mesh:
                boxes = [((0,) * len(spec.shape), spec.shape)] if self.full_writers[name] == rank else []
            elif 0 in spec.shape:
                boxes = [box for box, writer in spec.all_boxes(turn, {}) if writer == rank]
            else:
                boxes = spec.own_boxes(turn)
            if boxes:
                yield name, boxes

    def everything(self) -> Iterator[tuple[str, Spec, list[tuple[Box, int]]]]:
        """Yield what all ranks write: of each tensor its parts and their writers, in the order of writing."""
        known: dict[Any, list[Any]] = {}
        for turn, (name, spec) in enumerate(self.specs.items()):
            yield name, spec, self.boxes(turn, name, known)

    def boxes(self, turn: int, name: str, known: dict[Any, list[Any]]) -> list[tuple[Box, int]]:
        """Return the parts of one tensor and their writers; ``turn`` and ``known`` as in :meth:`Spec.all_boxes`."""
        spec = self.specs[name]
        if spec.mesh:
            return spec.all_boxes(turn, known)
        return [(((0,) * len(spec.shape), spec.shape), self.full_writers[name])]


def spread(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]], world_size: int) -> dict[str, int]:
    """Deal tensors out to ranks that hold them, so that all write about as many bytes.

    Args:
        sizes: bytes of each tensor.
        holders: of a tensor that only some ranks have, these.
        world_size: number of ranks.
    """
    writers: dict[str, int] = {}
    loads = [(0, rank) for rank in range(world_size)]
    limited = dict.fromkeys(range(world_size), 0) if holders else {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if name in holders:
            rank = min(holders[name], key=lambda rank: (limited[rank], rank))
            limited[rank] += sizes[name]
        else:
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + sizes[name], rank))
        writers[name] = rank
    return writers


def structure_of(
    flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]], specs: Specs, world_size: int
) -> Structure:
    """Return the structure of a state of which all ranks have the same names."""
    tensors = {name: specs.of(value) for name, value in flat.items() if isinstance(value, torch.Tensor)}
    sizes = {name: spec.nbytes for name, spec in tensors.items() if not spec.mesh}
    values = tuple(name for name in flat if name not in tensors)
    return Structure(tensors, values, spread(sizes, {}, world_size), dict(paths))


def merged(structures: Mapping[int, Structure], kinds: Sequence[int], rank: int, world_size: int) -> Structure:
    """Return the structure of a state of which ranks have different names.

    Args:
        structures: of each kind of rank its structure, by the lowest rank of the kind.
        kinds: the lowest rank of the kind of each rank.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        ValueError: ranks have tensors of one name that differ in shape or dtype.
    """
    specs: dict[str, Spec] = {}
    chosen_by: dict[str, int] = {}
    holders: dict[str, list[int]] = {}
    for first, structure in sorted(structures.items()):
        for name, spec in structure.specs.items():
            known = specs.setdefault(name, spec)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise ValueError(
                    f"{name} is {known.shape} of {known.dtype} on rank {chosen_by[name]}, and {spec.shape} of "
                    f"{spec.dtype} on rank {first}: ranks must give parts of the same tensor this name"
                )
            chosen_by.setdefault(name, first)
            if not spec.mesh:
                holders.setdefault(name, []).append(first)
    ranks_of: dict[int, list[int]] = {}
    for member, first in enumerate(kinds):
        ranks_of.setdefault(first, []).append(member)
    own: dict[str, Spec] = {}
    full: dict[str, list[int]] = {}
    for name, spec in specs.items():
        if spec.mesh:
            position = spec.ranks.index(rank) if rank in spec.ranks else None
            at = None if position is None else _unravel(position, spec.mesh)
            own[name] = replace(spec, coordinate=at)
        else:
            own[name] = spec
            full[name] = [member for first in holders[name] for member in ranks_of[first]]
    values: dict[str, None] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for _, structure in sorted(structures.items()):
        values.update(dict.fromkeys(structure.values))
        paths.update(structure.paths)
    writers = spread({name: specs[name].nbytes for name in full}, full, world_size)
    return Structure(own, tuple(name for name in values if name not in own), writers, paths)


def _unravel(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(sizes):
        position, index = divmod(position, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))
