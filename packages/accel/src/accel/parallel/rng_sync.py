"""Random number generators of ranks that work on the same samples."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from accel_state import PartialState

from .mesh import collectives_over, coordinate

_SAME_BATCH = ("tp", "cp", "sp", "pp")


def share_generators(mesh: DeviceMesh, state: PartialState) -> None:
    """Give ranks with the same batch the same generators (python, numpy, torch, device). Every rank must call it."""
    device = state.device_backend
    for axis in _SAME_BATCH:
        if axis not in (mesh.mesh_dim_names or ()):
            continue
        device_state = None if device.name == "cpu" else device.get_rng_state()
        states = random.getstate(), np.random.get_state(), torch.get_rng_state(), device_state
        of_python, of_numpy, of_torch, of_device = collectives_over(mesh, axis, state).broadcast_object(states)
        if coordinate(mesh, axis):
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)
            if of_device is not None:
                device.set_rng_state(of_device)
