"""Moving batches to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_state.operations import send_to_device

_PLAIN = (int, float, str, bytes, bool, type(None))


def placement(device: torch.device | None, non_blocking: bool) -> Callable[[Any], Any]:
    """What moves a batch to the device; None leaves batches where they are."""
    if device is None:
        return _leave

    def place(batch: Any) -> Any:
        return batch if _is_on(batch, device) else send_to_device(batch, device, non_blocking=non_blocking)

    return place


def _leave(batch: Any) -> Any:
    return batch


def _is_on(batch: Any, device: torch.device) -> bool:
    """Whether the batch is known to need no move. Quick, and False in doubt."""
    kind = type(batch)
    if kind is torch.Tensor:
        return bool(batch.device == device)
    if kind is list or kind is tuple or kind is dict:
        for value in batch.values() if kind is dict else batch:
            # Most values are tensors; asking them here saves a call for each.
            if not (value.device == device if type(value) is torch.Tensor else _is_on(value, device)):
                return False
        return True
    return kind in _PLAIN
