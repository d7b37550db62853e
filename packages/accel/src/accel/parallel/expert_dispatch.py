"""Differentiable exchange of tokens between the ranks that hold different experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import FakeTensor
from .differentiable import differentiable, same

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs (rows, width) of this rank's experts, from rows (rows, width) and the local number of each row's expert."""


def dispatched(
    compute: Compute, hidden: torch.Tensor, index: torch.Tensor, experts: int, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the experts that each token was routed to. Every rank of the axis must call it.

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
    has_values = not isinstance(flat, FakeTensor)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts] if has_values else flat.new_zeros(experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    if has_values:
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = received.view(ranks, -1).sum(1).tolist()
    else:  # in a plan: all experts alike
        each, more = divmod(flat.numel(), ranks)
        sent = [each + (rank < more) for rank in range(ranks)]
        got = [sent[mesh.get_local_rank()]] * ranks
    order = order[: sum(sent)]
    rows = exchanged(hidden[order // k], got, sent, group)
    numbers = torch.arange(experts // ranks, device=hidden.device).repeat(ranks)
    numbers = numbers.repeat_interleave(received, output_size=sum(got))
    back = exchanged(compute(rows, numbers), sent, got, group)
    outputs = back.new_zeros((tokens * k, back.shape[-1])).index_copy(0, order, back)
    return outputs.view(tokens, k, -1), counts


def exchanged(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all: ``sent[i]`` rows go to rank ``i``, and ``received[i]`` come from it."""
    there = partial(_exchange, received=received, sent=sent, group=group)
    return differentiable(rows, there, partial(_exchange, received=sent, sent=received, group=group))


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the same tensor, with its gradient multiplied by a factor."""
    return x if factor == 1 else differentiable(x, same, partial(torch.mul, other=factor))


def _exchange(rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
