"""Which tensors share memory, and the memory of a tensor."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import devices


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return a key that is equal for tensors that share memory: device, storage address, and size in bytes."""
    storage = tensor.untyped_storage()
    try:
        return tensor.device, storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # a device whose tensors have no address
        device = devices.of(tensor.device)
        if device is None or device.has_storage:
            raise
        return tensor.device, device.tensor_id(tensor), tensor.nbytes


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes and without a copy.

    ``tensor.numpy().data`` would need numpy, which torch does without.
    """
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # kept as long as the memory is used
    return memoryview(memory)
