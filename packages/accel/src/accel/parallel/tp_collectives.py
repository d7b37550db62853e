"""Differentiable collectives of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .differentiable import Collective, differentiable, same


def share_of(width: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Offset and number of this rank's columns out of ``width``; the last ranks may have fewer, or none."""
    return _share(width, mesh.size(), mesh.get_local_rank())


def _share(width: int, ranks: int, rank: int) -> tuple[int, int]:
    at_most = -(-width // ranks)
    begin = min(rank * at_most, width)
    return begin, min(at_most, width - begin)


def shared(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return an input that is replicated on all ranks; its gradient is the sum over the ranks."""
    return differentiable(x, same, partial(_all_reduced, mesh=mesh))


class SharedInput:
    """A common input of several layers of a module: its gradients are added and then all-reduced once."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, mark: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self._mark = mark or partial(shared, mesh=mesh)
        self._known: tuple[torch.Tensor, int, bool, torch.Tensor] | None = None
        self._open = False
        # Every rank must reuse the same inputs, so they are forgotten after the forward, not when memory is freed.
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of ``mark`` (default :func:`shared`), computed once per tensor and forward."""
        if not self._open or x.is_inference():
            return self._mark(x)
        known, key = self._known, (x._version, torch.is_grad_enabled())
        if known is None or known[0] is not x or known[1:3] != key:
            known = self._known = (x, *key, self._mark(x))
        return known[3]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._known, self._open = None, True

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._known, self._open = None, False


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All-reduce: the sum over the ranks."""
    return differentiable(x, *collectives_of_sum(mesh))


def collectives_of_sum(mesh: DeviceMesh) -> tuple[Collective, Collective]:
    """Return the collective of :func:`summed`, and the function of its gradient."""
    return partial(_all_reduced, mesh=mesh), _unchanged


def joined(x: torch.Tensor, mesh: DeviceMesh, width: int, dim: int = -1) -> torch.Tensor:
    """All-gather: the columns of all ranks along the last dimension (or another one), ``width`` in all."""
    return differentiable(
        x, partial(_all_joined, mesh=mesh, width=width, dim=dim), partial(_columns, mesh=mesh, dim=dim)
    )


def part(x: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """Return this rank's columns of a replicated input, or its part along another dimension."""
    join = partial(_all_joined, mesh=mesh, width=x.shape[dim], dim=dim)
    return differentiable(x, partial(_columns, mesh=mesh, dim=dim), join)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _all_reduced(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


def _all_joined(x: torch.Tensor, mesh: DeviceMesh, width: int, dim: int) -> torch.Tensor:
    sizes = [_share(width, mesh.size(), rank)[1] for rank in range(mesh.size())]
    # All-gather needs tensors of equal size.
    missing = list(x.shape)
    missing[dim] = sizes[0] - x.shape[dim]
    padded = torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x.contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=mesh.get_group())
    # A copy of them: fully_shard sets hooks on what modules return, which views would lose.
    return torch.cat([item.narrow(dim, 0, size) for item, size in zip(parts, sizes, strict=True)], dim)


def _columns(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    begin, size = share_of(x.shape[dim], mesh)
    # A copy, not a view, which would keep the full tensor.
    return x.narrow(dim, begin, size).clone(memory_format=torch.contiguous_format)
