"""Writes the tensors of a sharded state whole, in safetensors files that other libraries read as they are.

Each tensor is gathered on the rank that writes it: tensors are divided among all ranks by size, so each rank receives,
holds and writes an equal share. The metadata is that of ``torch.distributed.checkpoint``, with the places of the values
in these files, so a state is loaded like any other sharded one.

    model-00001-of-00004.safetensors    a rank's share of the tensors
    model.safetensors.index.json        the file of each tensor
    .metadata                           shapes, dtypes and places
    __0_0.distcp                        values that are not tensors, if there are any
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accel_state.collectives.single import Collectives
from accel_state.safetensors_writer import layout

from .._torch_compat import storage_info
from ..names import SAFETENSORS_SUFFIX
from ..parts import Part, WeightsPart
from .specs import Box, Structure, spread
from .writer import Planned, ShardPart, plan_state, shard_file, write_metadata, write_synced

INDEX_NAME = "model.safetensors.index.json"
# Tensors are gathered together until they have this size.
_GROUP_BYTES = 1 << 28


def whole_state(
    state: dict[str, Any], directory: str, collectives: Collectives
) -> tuple[list[Part], Callable[[Path], None]]:
    """Gather each tensor on one rank, and plan how ranks write them. Every rank must call it.

    Args:
        state: as in :func:`.writer.shard_state`, with one root; tensors are named without it.
        directory: where the files go, in the checkpoint.
        collectives: of the ranks that hold the state.

    Returns:
        The file of this rank, and what writes the metadata, as from :func:`.writer.shard_state`.

    Raises:
        CheckpointError: ranks have different tensors of one name.
        ConfigurationError: the safetensors format does not have a dtype.
    """
    planned = plan_state(state, collectives)
    structure = planned.structure
    owners = spread({name: spec.nbytes for name, spec in structure.specs.items()}, {}, collectives.world_size)
    files = _files(structure, owners)
    content = _gathered(planned, owners, collectives)
    parts: list[Part] = []
    if content:
        parts.append(WeightsPart(f"{directory}/{files[collectives.rank]}", content, each_rank=True))
    if planned.values:
        name = f"{directory}/{shard_file(collectives.rank)}"
        parts.append(ShardPart(name, list(planned.values.values()), each_rank=True))
    lengths = {name: len(value) for name, value in planned.values.items()}
    finish = partial(_write_tables, directory=directory, structure=structure, owners=owners, files=files)
    return parts, partial(finish, lengths=lengths, key=("whole", *planned.key))


def _files(structure: Structure, owners: Mapping[str, int]) -> dict[int, str]:
    """Return the file of each rank that writes one; raises ConfigurationError for what a file cannot hold."""
    writing = sorted(set(owners.values()))
    layout(_described(structure, owners, None))
    return {
        rank: f"model-{number:05d}-of-{len(writing):05d}{SAFETENSORS_SUFFIX}"
        for number, rank in enumerate(writing, start=1)
    }


def _described(structure: Structure, owners: Mapping[str, int], rank: int | None) -> dict[str, torch.Tensor]:
    """Return what a rank writes (None: what all do) on the meta device, by the names in the files."""
    tensors = {}
    for name, spec in structure.specs.items():
        if rank in (None, owners[name]):
            tensors[_short(structure, name)] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return tensors


def _short(structure: Structure, name: str) -> str:
    return ".".join(map(str, structure.paths[name][1:]))


def _gathered(planned: Planned, owners: Mapping[str, int], collectives: Collectives) -> dict[str, torch.Tensor]:
    """Return the full tensors that this rank writes, in host memory."""
    full: dict[str, torch.Tensor] = {}
    rank, structure = collectives.rank, planned.structure
    held = dict(structure.own(rank))
    layouts: dict[Any, list[Any]] = {}
    for group in _groups(structure):
        sent, received, targets = [], [], []
        for turn, name in group:
            spec, owner = structure.specs[name], owners[name]
            if owner != rank:
                for begin, size in held.get(name, ()):
                    if 0 not in size:
                        sent.append((owner, planned.parts[name][begin].contiguous()))
                continue
            whole = full[_short(structure, name)] = torch.empty(spec.shape, dtype=spec.dtype)
            for box, source in structure.boxes(turn, name, layouts):
                if 0 in box[1]:
                    continue
                if source == rank:
                    _part(whole, box).copy_(planned.parts[name][box[0]])
                else:
                    arriving = torch.empty(box[1], dtype=spec.dtype)
                    received.append((source, arriving))
                    targets.append((_part(whole, box), arriving))
        collectives.exchange(sent, received)
        for target, arriving in targets:
            target.copy_(arriving)
    return full


def _groups(structure: Structure) -> Iterator[list[tuple[int, str]]]:
    """Yield the names with their numbers, as many as are gathered together."""
    group: list[tuple[int, str]] = []
    size = 0
    for turn, (name, spec) in enumerate(structure.specs.items()):
        group.append((turn, name))
        size += spec.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole


def _write_tables(
    checkpoint: Path,
    directory: str,
    structure: Structure,
    owners: Mapping[str, int],
    files: Mapping[int, str],
    lengths: Mapping[str, int],
    key: tuple[Any, ...],
) -> None:
    """Write the metadata and the index, when all ranks have written their files."""
    make = partial(_metadata, structure, owners, files, lengths)
    write_metadata(checkpoint, directory, make, key)
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in structure.specs.values())},
        "weight_map": {_short(structure, name): files[owner] for name, owner in owners.items()},
    }
    write_synced(checkpoint / directory / INDEX_NAME, json.dumps(index, indent=2).encode())


def _metadata(
    structure: Structure, owners: Mapping[str, int], files: Mapping[int, str], lengths: Mapping[str, int]
) -> Metadata:
    places: dict[MetadataIndex, Any] = {}
    saved: dict[str, Any] = {}
    begins: dict[str, int] = {}
    for rank in files:
        head, after = layout(_described(structure, owners, rank))
        begins.update({name: len(head) + begin for name, begin in after.items()})
    for name, spec in structure.specs.items():
        size = torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(dtype=spec.dtype, requires_grad=spec.requires_grad)
        saved[name] = TensorStorageMetadata(properties, size, [chunk])
        place = storage_info(files[owners[name]], begins[_short(structure, name)], spec.nbytes)
        places[MetadataIndex(name, chunk.offsets, 0)] = place
    begin = 0
    for name, length in lengths.items():
        saved[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = storage_info(shard_file(0), begin, length)
        begin += length
    return Metadata(saved, planner_data=dict(structure.paths), storage_data=places)
