"""Every private name of torch that accel-checkpoint uses. Slow modules of torch are imported where they are needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

# Restores the lazy negation of a tensor that was copied byte by byte; there is no public constructor for such a view.
neg_view = torch._neg_view


def get_backend(group: Any) -> Any:
    """Return gloo's object below a process group, which frees itself without the GIL; it has no public name."""
    return group._get_backend(torch.device("cpu"))


def local_shape_and_offset(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a DTensor's part at a coordinate of its mesh, and where it begins; no public function."""
    return _local_shape_and_offset(tuple(shape), tuple(mesh), tuple(coordinate), tuple(placements))


@functools.lru_cache(maxsize=1024)  # layers repeat, and so do the shapes of an optimizer's averages
def _local_shape_and_offset(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor import _utils

    if hasattr(_utils, "_compute_local_shape_and_global_offset"):
        return _utils._compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
    # torch 2.6 takes a mesh instead, of which it reads no more than this.
    described = SimpleNamespace(ndim=len(mesh), size=mesh.__getitem__, get_coordinate=lambda: list(coordinate))
    return _utils.compute_local_shape_and_global_offset(shape, cast(Any, described), placements)


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return an entry of a distributed checkpoint's metadata: where an item is.

    Only ``FileSystemWriter`` makes them.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
