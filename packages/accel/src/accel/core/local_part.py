"""A rank's part of a tensor that may be sharded."""

from __future__ import annotations

from typing import Any

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor is its own part."""
    # Known by its method: every Accelerator loads this module, and torch.distributed.tensor takes a second to import.
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = sharded.to_local()
    return part
