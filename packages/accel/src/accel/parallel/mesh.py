"""The device mesh of a run: its process groups by axis, and by groups of axes."""

from __future__ import annotations

import math
import random
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState, environments
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import flatten_mesh
from .axes import AVERAGING_AXES, AXES, DATA_AXES, EXPERT_AXES, SHARDING_AXES

_GROUPED = {"dp": DATA_AXES, "dp_cp": AVERAGING_AXES, "dp_shard_cp": SHARDING_AXES}
"""Groups of axes that are flattened into one under these names."""

_FLATTENED: Any = WeakIdKeyDictionary()
"""The flattened meshes, by mesh and name. Slicing a mesh by a flattened name is deprecated in torch."""

_EXPERTS: Any = WeakIdKeyDictionary()
"""The meshes of experts, by mesh and size."""

_WORLDS: Any = WeakIdKeyDictionary()
"""A weak reference to the process group that each mesh was created from."""


def build(sizes: Mapping[str, int], check_world: Callable[[int], Any], device_type: str) -> DeviceMesh:
    """Return a mesh of the axes with more than one rank; every rank must call it."""
    if not dist.is_initialized() and environments.detect().world_size > 1:
        PartialState(cpu=device_type == "cpu")  # creates the process group
    if not dist.is_initialized():
        total = math.prod(sizes.values())
        raise ConfigurationError(
            f"a device mesh of {total} processes needs a process group. Start the script with `accel launch "
            f"--num_processes {total}`."
        )
    check_world(dist.get_world_size())
    names = [axis for axis in AXES if sizes[axis] > 1]
    # fully_shard keeps copies in sync only of what it shards, so unsharded copies are "sharded" over one rank.
    if sizes["dp_replicate"] > 1 and len(names) > 1 and not set(names) & set(SHARDING_AXES):
        names.insert(names.index("dp_replicate") + 1, "dp_shard")
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in names), mesh_dim_names=tuple(names))
    _flatten(mesh)
    return mesh


def adopt(mesh: DeviceMesh, tp_size: int) -> dict[str, int]:
    """Check a mesh of the user for tensor parallelism, and add the groups of axes to it."""
    names = list(mesh.mesh_dim_names or ())
    if names != [axis for axis in AXES if axis in names] or "tp" not in names:
        raise ConfigurationError(
            f"torch_device_mesh has the axes {', '.join(names) or 'without names'}. Allowed: 'tp', and others of "
            f"{', '.join(AXES)} in this order; or leave it out and pass tp_size."
        )
    if tp_size not in (1, mesh["tp"].size()):
        raise ConfigurationError(
            f"tp_size={tp_size}, but axis 'tp' of torch_device_mesh has size {mesh['tp'].size()}. Leave tp_size out."
        )
    if "dp_replicate" in names and not set(names) & set(SHARDING_AXES):
        raise ConfigurationError(
            "torch_device_mesh has dp_replicate, but no dp_shard, which fully_shard needs to keep the copies in sync. "
            "Add the axis dp_shard of size 1 after it, or leave the mesh out and pass tp_size."
        )
    _flatten(mesh)
    return {axis: mesh[axis].size() for axis in names}


def is_alive(mesh: DeviceMesh | None) -> bool:
    """Return True if the process group that a mesh was created from still exists."""
    world = _WORLDS.get(mesh) if mesh is not None else None
    return world is not None and dist.is_initialized() and world() is dist.group.WORLD


def _flatten(mesh: DeviceMesh) -> None:
    """Create the groups of axes; a collective call, since it creates process groups."""
    _WORLDS[mesh] = weakref.ref(dist.group.WORLD)
    flattened = _FLATTENED[mesh] = {}
    for name, axes in _GROUPED.items():
        present = tuple(axis for axis in mesh.mesh_dim_names or () if axis in axes)
        if present:
            flattened[name] = flatten_mesh(mesh[present], name)


def coordinate(mesh: DeviceMesh | None, axis: str) -> int:
    """Return this process's coordinate on an axis; 0 on an axis that the mesh does not have."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh.get_local_rank(axis)


def collectives_over(mesh: DeviceMesh, name: str, state: PartialState) -> Collectives:
    """Return the collectives along an axis or a group of axes.

    Where the mesh has none of them, they are those of a single process.
    """
    part = sub_mesh(mesh, name)
    if part is None or part.size() == 1:
        return Collectives()
    if part.size() == state.num_processes:
        return state.collectives
    return state.collectives.over(part.get_group())


def sub_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """Return the part of the mesh along an axis or a group of axes; None where it has none of them."""
    if name in _GROUPED:
        return _FLATTENED[mesh].get(name)
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def share_generators(mesh: DeviceMesh, state: PartialState) -> None:
    """Give ranks with the same batch the same generators (python, numpy, torch, device). Every rank must call it."""
    device = state.device_backend
    for axis in mesh.mesh_dim_names or ():
        if axis not in DATA_AXES:
            device_state = None if device.name == "cpu" else device.get_rng_state()
            # Not in the form of accel_data.rng_state, which cannot be restored in the fake tensors of a plan.
            states = random.getstate(), np.random.get_state(), torch.get_rng_state(), device_state
            of_python, of_numpy, of_torch, of_device = collectives_over(mesh, axis, state).broadcast_object(states)
            if coordinate(mesh, axis):
                random.setstate(of_python)
                np.random.set_state(of_numpy)
                torch.set_rng_state(of_torch)
                if of_device is not None:
                    device.set_rng_state(of_device)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh for ``fully_shard``: the ranks that parameters are sharded over, by the copies, or None."""
    names = mesh.mesh_dim_names or ()
    sharding = [axis for axis in names if axis in SHARDING_AXES]
    if not sharding:
        return None
    last = sharding[0] if len(sharding) == 1 else "dp_shard_cp"
    if "dp_replicate" not in names or mesh["dp_replicate"].size() == 1:
        return sub_mesh(mesh, last)
    with warnings.catch_warnings():
        # Torch has no other way yet to get two axes of which one is flattened.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh["dp_replicate", last]


def expert_mesh(mesh: DeviceMesh, ep_size: int) -> DeviceMesh:
    """Return the same ranks in the same order, with dp_shard, cp and tp divided into "efsdp" and "ep" instead.

    Ranks of "ep" are consecutive, since they exchange tokens in every layer; each expert is sharded over "efsdp". A
    collective call, once for each mesh.
    """
    known = _EXPERTS.setdefault(mesh, {})
    if ep_size not in known:
        names = mesh.mesh_dim_names or ()
        outer = {axis: mesh[axis].size() for axis in names if axis not in EXPERT_AXES}
        inner = math.prod(mesh[axis].size() for axis in names if axis in EXPERT_AXES)
        sizes = {**outer, "efsdp": inner // ep_size, "ep": ep_size}
        known[ep_size] = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found: DeviceMesh = known[ep_size]
    return found
