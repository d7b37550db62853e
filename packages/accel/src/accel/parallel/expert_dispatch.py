"""Differentiable exchange of tokens between the ranks that hold different experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import FakeTensor
from .tp_collectives import share_of

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs (rows, width) of this rank's experts, from rows (rows, width) and the local number of each row's expert."""


def dispatched(
    compute: Compute, hidden: torch.Tensor, index: torch.Tensor, experts: int, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the experts that each token was routed to. Every rank of the axis must call it.

    Args:
        compute: computes the rows that this rank receives.
        hidden: tokens of this rank, (tokens, width).
        index: the experts of each token, (tokens, k); numbers outside of ``range(experts)`` mean no expert, and give
            zeros.
        experts: number of experts of all ranks; each has as many as the others, in the order of the ranks.
        mesh: the ranks.

    Returns:
        Outputs (tokens, k, width), and how many of this rank's tokens go to each expert, (experts,).
    """
    tokens, k = index.shape
    group, ranks = mesh.get_group(), mesh.size()
    flat = index.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(flat, stable=True)  # by expert, then by token: the same in every run
    if isinstance(flat, FakeTensor):
        counts, sent, got, received = _even_routing(flat, experts, mesh)
    else:
        counts = torch.bincount(flat, minlength=experts + 1)[:experts]
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = received.view(ranks, -1).sum(1).tolist()
    order = order[: sum(sent)]
    rows = exchanged(hidden[order // k], got, sent, group)
    numbers = torch.arange(experts // ranks, device=hidden.device).repeat(ranks)
    numbers = numbers.repeat_interleave(received, output_size=sum(got))
    back = exchanged(compute(rows, numbers), sent, got, group)
    outputs = back.new_zeros((tokens * k, back.shape[-1])).index_copy(0, order, back)
    return outputs.view(tokens, k, -1), counts


def _even_routing(
    flat: torch.Tensor, experts: int, mesh: DeviceMesh
) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
    """The counts of a rank and the sizes of its messages where tokens have no values (``accel plan``): all alike."""
    each, more = divmod(flat.numel(), mesh.size())
    sizes = [each + (rank < more) for rank in range(mesh.size())]
    counts = flat.new_zeros(experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=mesh.get_group())
    own = sizes[mesh.get_local_rank()]
    return counts, sizes, [own] * mesh.size(), received


def exchanged(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all: ``sent[i]`` rows go to rank ``i``, and ``received[i]`` come from it."""
    out: torch.Tensor = _Exchange.apply(rows, received, sent, group)
    return out


def own_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor that is the same on all ranks of a mesh; the last ranks may have fewer."""
    out: torch.Tensor = _OwnRows.apply(x, mesh)
    return out


def joined_rows(x: torch.Tensor, mesh: DeviceMesh, rows: int) -> torch.Tensor:
    """The inverse of :func:`own_rows`: the rows of all ranks, ``rows`` in all."""
    out: torch.Tensor = _JoinedRows.apply(x, mesh, rows)
    return out


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The same tensor, with its gradient multiplied by a factor."""
    out: torch.Tensor = x if factor == 1 else _ScaledGradient.apply(x, factor)
    return out


def _exchange(rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


def _rows_of(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    begin, count = share_of(x.shape[0], mesh)
    return x.narrow(0, begin, count).clone()


def _rows_of_all(x: torch.Tensor, mesh: DeviceMesh, rows: int) -> torch.Tensor:
    at_most = -(-rows // mesh.size())  # all-gather needs tensors of equal size
    padded = torch.cat([x, x.new_zeros((at_most - x.shape[0], *x.shape[1:]))])
    parts = [torch.empty_like(padded) for _ in range(mesh.size())]
    dist.all_gather(parts, padded, group=mesh.get_group())
    # Not a view of the rows: fully_shard sets hooks on what modules return, which views would lose.
    begins = [min(rank * at_most, rows) for rank in range(mesh.size() + 1)]
    return torch.cat([part[: end - begin] for part, begin, end in zip(parts, begins, begins[1:], strict=False)])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sent, received = ctx.sizes
        return _exchange(gradients[0], sent, received, ctx.group), None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, ctx.rows = mesh, x.shape[0]
        return _rows_of(x, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _rows_of_all(gradients[0], ctx.mesh, ctx.rows), None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, rows: int) -> torch.Tensor:
        ctx.mesh = mesh
        return _rows_of_all(x, mesh, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _rows_of(gradients[0], ctx.mesh), None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None
