"""Random numbers of ranks that compute the same thing."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from accel_state import PartialState

from .mesh import collectives_over, coordinate

_SAME_BATCH = ("tp", "cp", "sp", "pp")


def share_generators(mesh: DeviceMesh, state: PartialState) -> None:
    """Give ranks that get the same batch the same generators: python's, numpy's, torch's and the device's. Every rank
    must call it.

    What they augment is then the same, and so is what they drop of activations that each of them has; ranks with other
    samples keep generators of their own.
    """
    device = state.device_backend
    for axis in _SAME_BATCH:
        if axis not in (mesh.mesh_dim_names or ()):
            continue
        own = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            None if device.name == "cpu" else device.get_rng_state(),
        )
        of_python, of_numpy, of_torch, of_device = collectives_over(mesh, axis, state).broadcast_object(own)
        if coordinate(mesh, axis):
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
            if of_device is not None:
                device.set_rng_state(of_device)
