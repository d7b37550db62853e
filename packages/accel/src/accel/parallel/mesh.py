"""The mesh of a run: every process has a coordinate on every axis."""

from __future__ import annotations

import math
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.collectives.torch import TorchCollectives
from accel_state.errors import ConfigurationError

from .config import AVERAGING_AXES, AXES, DATA_AXES, SHARDING_AXES

if TYPE_CHECKING:
    from .config import ParallelismConfig

_FLAT = {"dp": DATA_AXES, "dp_cp": AVERAGING_AXES, "dp_shard_cp": SHARDING_AXES}
"""Axes under one name, as far as they are in the mesh."""

_FLATTENED: Any = WeakIdKeyDictionary()
"""What came of that, by mesh and name. Torch is about to forget it."""

_WORLDS: Any = WeakIdKeyDictionary()
"""The process group that each mesh was made of."""


def build(config: ParallelismConfig, device_type: str) -> DeviceMesh:
    """A mesh of the active axes of a configuration; every rank must call it.

    Beside the axes it knows "dp" (ranks with samples of their own), "dp_cp" (ranks over which losses and gradients are
    averaged) and "dp_shard_cp" (ranks that parameters are divided over), where these have more than one rank.

    Raises:
        ConfigurationError: there is another number of processes than the sizes say, or no process group.
    """
    if not dist.is_initialized():
        raise ConfigurationError(
            f"a device mesh of {config.total_size} processes needs a process group. Start the script with `accel "
            "launch --num_processes "
            f"{config.total_size}`, and make the Accelerator (or PartialState) first."
        )
    config.for_world(dist.get_world_size())
    # fully_shard keeps copies of what it shards, so copies of undivided models are "sharded" over one rank.
    needs_shard = config.dp_replicate_enabled and math.prod(config.size(axis) for axis in SHARDING_AXES) == 1
    names = [
        axis
        for axis in AXES
        if config.size(axis) > 1 or (axis == "dp_shard" and needs_shard and len(config.active_mesh_dims) > 1)
    ]
    mesh = init_device_mesh(device_type, tuple(config.size(axis) for axis in names), mesh_dim_names=tuple(names))
    flatten(mesh)
    return mesh


def is_alive(mesh: DeviceMesh | None) -> bool:
    """Whether a mesh belongs to the process group there is; ending an Accelerator's training ends the group and its
    meshes.
    """
    world = _WORLDS.get(mesh) if mesh is not None else None
    return world is not None and dist.is_initialized() and world() is dist.group.WORLD


def flatten(mesh: DeviceMesh) -> None:
    """Give groups of axes a name; every rank must call it, since it makes process groups."""
    _WORLDS[mesh] = weakref.ref(dist.group.WORLD)
    made = _FLATTENED[mesh] = {}
    for name, axes in _FLAT.items():
        present = tuple(axis for axis in mesh.mesh_dim_names or () if axis in axes)
        if present:
            made[name] = mesh[present]._flatten(name)


def config_of(mesh: DeviceMesh, tp_size: int) -> ParallelismConfig:
    """The configuration of a mesh that the user has made.

    Raises:
        ConfigurationError: it has axes of other names, in another order, or another size of "tp".
    """
    from .config import ParallelismConfig

    names = list(mesh.mesh_dim_names or ())
    if names != [axis for axis in AXES if axis in names] or "tp" not in names:
        raise ConfigurationError(
            f"torch_device_mesh has the axes {', '.join(names) or 'without names'}. Allowed: 'tp', and others of "
            f"{', '.join(AXES)} in this "
            "order; or leave it out and give tp_size."
        )
    if tp_size not in (1, mesh["tp"].size()):
        raise ConfigurationError(
            f"tp_size={tp_size}, but axis 'tp' of torch_device_mesh has size {mesh['tp'].size()}. Leave tp_size out."
        )
    if "dp_replicate" in names and not set(names) & set(SHARDING_AXES):
        raise ConfigurationError(
            "torch_device_mesh has dp_replicate, but no dp_shard: the copies of a model whose layers are shared are "
            "kept by fully_shard. "
            "Add the axis dp_shard of size 1 after it, or leave the mesh out and give tp_size."
        )
    sizes = {f"{axis}_size": mesh[axis].size() if axis in names else 1 for axis in AXES}
    config = ParallelismConfig(**sizes)  # type: ignore[arg-type]
    flatten(mesh)
    config.device_mesh = mesh
    return config


def coordinate(mesh: DeviceMesh | None, axis: str) -> int:
    """This process's coordinate on an axis; 0 on an axis that the mesh has not."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh.get_local_rank(axis)


def collectives_over(mesh: DeviceMesh, name: str, state: PartialState) -> Collectives:
    """The communication along an axis, or along axes that have a name together; of one process where the mesh has none
    of them.
    """
    part = sub_mesh(mesh, name)
    if part is None or part.size() == 1:
        return Collectives()
    if part.size() == state.num_processes:
        return state.collectives
    device: Any = getattr(state.collectives, "device", state.device)
    return TorchCollectives(device, part.get_group())


def sub_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The part of the mesh along an axis, or along axes that have a name together; None where it has none of them."""
    if name in _FLAT:
        return _FLATTENED[mesh].get(name)
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def fsdp_mesh(config: ParallelismConfig, mesh: DeviceMesh) -> DeviceMesh | None:
    """What ``fully_shard`` works on: the ranks that parameters are divided over, in as many copies as there are; None
    without them.
    """
    names = mesh.mesh_dim_names or ()
    sharding = [axis for axis in names if axis in SHARDING_AXES]
    if not sharding:
        return None
    last = sharding[0] if len(sharding) == 1 else "dp_shard_cp"
    if not config.dp_replicate_enabled:
        return sub_mesh(mesh, last)
    with warnings.catch_warnings():
        # There is no other way yet to have two axes of which one is made of several.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh["dp_replicate", last]
