"""Differentiable collectives of hidden states that are sharded along the sequence over the tensor-parallel axis.

Full tensors have the shape ``[batch, length, ...]``. Each of the ``n`` ranks has the rows
``[batch, ceil(length / n), ...]``; what is missing at the end of the sequence is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ..core.kept_results import is_keeping, keep
from .differentiable import Collective, differentiable

# torch 2.13 renamed both, and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rows_per_rank(length: int, mesh: DeviceMesh) -> int:
    """Return the positions of each rank, padding included, of sequences of ``length`` positions."""
    return -(-length // mesh.size())


def split(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a replicated tensor; the gradient is gathered."""
    return differentiable(x, partial(_own_rows, mesh=mesh), partial(_all_rows, mesh=mesh, length=x.shape[1]))


def join(x: torch.Tensor, mesh: DeviceMesh, length: int) -> torch.Tensor:
    """Return the rows of all ranks, for computations that are replicated; the gradient is this rank's rows of it."""
    return differentiable(x, partial(_all_rows, mesh=mesh, length=length), partial(_own_rows, mesh=mesh))


def gather(x: torch.Tensor, mesh: DeviceMesh, length: int) -> torch.Tensor:
    """Return the rows of all ranks, for computations that are sharded.

    The gradient is summed over the ranks and scattered.
    """
    forward: Collective = partial(_all_rows, mesh=mesh, length=length)
    if is_keeping(gathers=True):
        forward = partial(_kept_rows, mesh=mesh, length=length)
    return differentiable(x, forward, partial(summed_rows, mesh=mesh))


def _kept_rows(x: torch.Tensor, mesh: DeviceMesh, length: int) -> torch.Tensor:
    return keep(lambda: _all_rows(x, mesh, length))


def collectives_of_scatter(mesh: DeviceMesh, length: int) -> tuple[Collective, Collective]:
    """Return the reduce-scatter of ``length`` positions, and the all-gather that computes its gradient."""
    return partial(summed_rows, mesh=mesh), partial(_all_rows, mesh=mesh, length=length)


def _padded(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    missing = rows_per_rank(x.shape[1], mesh) * mesh.size() - x.shape[1]
    return functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, missing)) if missing else x


def _own_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    rows = rows_per_rank(x.shape[1], mesh)
    # A copy, not a view, which would keep the full tensor.
    own = _padded(x, mesh).narrow(1, mesh.get_local_rank() * rows, rows)
    return own.clone(memory_format=torch.contiguous_format)


def _all_rows(x: torch.Tensor, mesh: DeviceMesh, length: int) -> torch.Tensor:
    total = mesh.size() * x.shape[1]
    joined = x.new_empty((x.shape[0], total, *x.shape[2:]))
    if x.shape[0] == 1:  # the order of what arrives is that of the sequence
        _all_gather(joined.view(mesh.size(), *x.shape[1:]), x.contiguous(), group=mesh.get_group())
    else:
        parts = x.new_empty((mesh.size() * x.shape[0], *x.shape[1:]))
        _all_gather(parts, x.contiguous(), group=mesh.get_group())
        joined.unflatten(1, (mesh.size(), -1)).copy_(parts.unflatten(0, (mesh.size(), -1)).transpose(0, 1))
    # fully_shard warns of modules that return views.
    return joined if length == total else joined.narrow(1, 0, length).clone(memory_format=torch.contiguous_format)


def summed_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Reduce-scatter, without a gradient."""
    parts = _padded(x, mesh).unflatten(1, (mesh.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    own = x.new_empty((x.shape[0], rows_per_rank(x.shape[1], mesh), *x.shape[2:]))
    _reduce_scatter(own, parts, group=mesh.get_group())
    return own
