"""Every private name of torch that accel-checkpoint uses. Slow modules of torch are imported where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Restores the lazy negation of a tensor that was copied byte by byte; there is no public constructor for such a view.
neg_view = torch._neg_view


def local_shape_and_offset(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a DTensor's part at a coordinate of its mesh, and where it begins; no public function."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), list(coordinate), placements)


def storage_info(file: str, offset: int, length: int) -> Any:
    """An entry of a distributed checkpoint's metadata: where an item is. Only ``FileSystemWriter`` makes them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
