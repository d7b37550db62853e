"""Norms of gradients of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .._torch_compat import foreach_mul_, foreach_norm

Groups = tuple[dist.ProcessGroup, ...]


def groups_over(tensor: torch.Tensor) -> Groups:
    """Return the process groups over which a tensor is sharded; none for a plain tensor and for replicas."""
    if not isinstance(tensor, DTensor):
        return ()
    sharded = (axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return tuple(tensor.device_mesh.get_group(axis) for axis in sharded)


def power_sum(
    parts: Sequence[torch.Tensor],
    groups: Groups,
    norm_type: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the sum of ``|x| ** norm_type`` (for ``inf`` the largest ``|x|``) over all parts on all ranks.

    Args:
        parts: what this rank holds; may be empty.
        groups: the process groups that hold the other parts.
        norm_type: the order of the norm.
        device: of the result.
        dtype: to add up in, the same on all ranks; float64 if a part is of that type.
    """
    total = torch.zeros((), device=device, dtype=dtype)
    non_empty = [part.detach() for part in parts if part.numel()]
    if non_empty:
        norms = torch.stack([norm.to(dtype) for norm in foreach_norm(non_empty, norm_type, dtype=dtype)])
        total = (norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()).to(device)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return total


def norm_of(totals: Sequence[torch.Tensor], norm_type: float, stages: Groups, device: torch.device) -> torch.Tensor:
    """Return the norm, from power sums of disjoint sets of elements."""
    stacked = torch.stack(list(totals)) if totals else torch.zeros(1, device=device)
    is_inf = math.isinf(norm_type)
    total = stacked.max() if is_inf else stacked.sum()
    for group in stages:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_inf else dist.ReduceOp.SUM, group=group)
    return total if is_inf else total ** (1.0 / norm_type)


def scale_to_norm(parts: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place to a norm of at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_type: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        by_type.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), same in by_type.items():
        foreach_mul_(same, factor.to(device=device, dtype=dtype))


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without those that are views into another one."""
    kept: dict[int, list[tuple[int, int]]] = {}
    result = []
    for tensor in sorted(tensors, key=torch.Tensor.numel, reverse=True):
        ranges = kept.setdefault(tensor.untyped_storage().data_ptr(), [])
        begin = int(tensor.storage_offset())
        end = begin + tensor.numel()
        if not any(first <= begin and end <= last for first, last in ranges):
            ranges.append((begin, end))
            result.append(tensor)
    return result
