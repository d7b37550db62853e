"""A function of a tensor with a gradient of its own, as collectives have: what is sent back differs from autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Collective = Callable[[torch.Tensor], torch.Tensor]


def differentiable(x: torch.Tensor, forward: Collective, backward: Collective) -> torch.Tensor:
    """Return the result of ``forward(x)``; the gradient of x is ``backward`` of that of the result.

    Neither function may hold a tensor, which would be kept until the backward pass.
    """
    out: torch.Tensor = _Function.apply(x, forward, backward)
    return out


def same(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, for a function of which only the gradient is special."""
    return x.view_as(x)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.gradient_of = backward
        out: torch.Tensor = forward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.gradient_of(gradients[0]), None, None
