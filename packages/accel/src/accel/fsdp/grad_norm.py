"""Norms of gradients of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

Groups = tuple[dist.ProcessGroup, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory; a plain tensor is its own part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def groups_over(tensor: torch.Tensor) -> Groups:
    """The process groups over which a tensor is divided; none for a plain tensor and for copies."""
    if not isinstance(tensor, DTensor):
        return ()
    divided = (axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return tuple(tensor.device_mesh.get_group(axis) for axis in divided)


def power_sum(parts: Sequence[torch.Tensor], groups: Groups, norm_type: float, device: torch.device) -> torch.Tensor:
    """The sum of ``|x| ** norm_type`` (for ``inf`` the largest ``|x|``) over all parts of all ranks of the groups.

    Args:
        parts: this rank's parts; maybe none.
        groups: the groups of ranks that hold the other parts.
        norm_type: the p of the norm.
        device: where the groups communicate.

    Returns:
        A 0-dimensional fp32 tensor on that device.
    """
    total = torch.zeros((), device=device)
    filled = [part.detach() for part in parts if part.numel()]
    if filled:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(filled, norm_type, dtype=torch.float32)])
        total = (norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()).to(device)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return total


def norm_of(totals: Sequence[torch.Tensor], norm_type: float, stages: Groups, device: torch.device) -> torch.Tensor:
    """The norm, from power sums of disjoint sets of elements.

    Args:
        totals: the power sums; maybe none.
        norm_type: the p of the norm.
        stages: groups of ranks that have further elements.
        device: where the groups communicate.
    """
    stacked = torch.stack(list(totals)) if totals else torch.zeros(1, device=device)
    largest = math.isinf(norm_type)
    whole = stacked.max() if largest else stacked.sum()
    for group in stages:
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return whole if largest else whole ** (1.0 / norm_type)


def scale_to_norm(parts: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply gradients in place so that their norm is at most ``max_norm``; the formula of
    ``torch.nn.utils.clip_grad_norm_``.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        by_kind.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), same in by_kind.items():
        torch._foreach_mul_(same, factor.to(device=device, dtype=dtype))


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without those that lie inside another one."""
    kept: dict[int, list[torch.Tensor]] = {}
    for tensor in sorted(tensors, key=torch.Tensor.numel, reverse=True):
        same_memory = kept.setdefault(tensor.untyped_storage().data_ptr(), [])
        if not any(_lies_in(tensor, other) for other in same_memory):
            same_memory.append(tensor)
    return [tensor for group in kept.values() for tensor in group]


def _lies_in(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    begin, end = other.storage_offset(), other.storage_offset() + other.numel()
    return begin <= tensor.storage_offset() and tensor.storage_offset() + tensor.numel() <= end
