"""A loss whose gradients exist already, because a pipeline's schedule ran forward and backward in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ComputedLoss(torch.autograd.Function):
    """``ComputedLoss.apply(trigger, value, report)``: a loss whose backward calls ``report`` with its gradient.

    ``trigger`` is any tensor that requires a gradient, ``value`` the loss; the gradient is the factor by which the loss
    was scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, trigger: torch.Tensor, value: torch.Tensor, report: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.report = report
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.report(gradients[0])
        return None, None, None
