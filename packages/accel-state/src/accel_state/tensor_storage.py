"""Which tensors share memory."""

from __future__ import annotations

import torch

from . import devices


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """A key that is equal for tensors that share memory: device, storage address, and size in bytes."""
    storage = tensor.untyped_storage()
    try:
        return tensor.device, storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # a device whose tensors have no address
        device = devices.of(tensor.device)
        if device is None or device.has_storage:
            raise
        return tensor.device, device.tensor_id(tensor), tensor.nbytes
