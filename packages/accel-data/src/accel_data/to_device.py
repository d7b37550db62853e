"""Moving batches to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_state.operations import send_to_device

_PLAIN = (int, float, str, bytes, bool, type(None))


def batch_mover(device: torch.device | None, non_blocking: bool) -> Callable[[Any], Any]:
    """Return a function that moves a batch to ``device``; with None it returns the batch as it is."""

    def keep(batch: Any) -> Any:
        return batch

    def move(batch: Any) -> Any:
        return batch if _is_on(batch, device) else send_to_device(batch, device, non_blocking=non_blocking)

    return keep if device is None else move


def _is_on(batch: Any, device: torch.device | None) -> bool:
    """Return True if the batch certainly needs no copy. Fast; False when unsure."""
    kind = type(batch)
    if kind is torch.Tensor:
        return bool(batch.device == device)
    if kind is list or kind is tuple or kind is dict:
        for value in batch.values() if kind is dict else batch:
            # Most values are tensors; checking them here saves a call for each.
            if not (value.device == device if type(value) is torch.Tensor else _is_on(value, device)):
                return False
        return True
    return kind in _PLAIN
