"""The product of a linear layer and its two gradients, each in 8 bits or in higher precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .matmul import multiply
from .scaling import delayed_scale, largest_of_rows, largest_value, quantize, scale_for


class Plan(NamedTuple):
    """What a layer computes in which type.

    Attributes:
        forward: 8-bit type of inputs and weights.
        backward: 8-bit type of gradients.
        fprop: whether the product of the forward pass stays in higher precision.
        dgrad: whether that for the gradient of the input does.
        wgrad: whether that for the gradient of the weight does.
        margin: powers of two of room above the largest value.
    """

    forward: torch.dtype
    backward: torch.dtype
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False
    margin: int = 0


class TensorwiseLinear(torch.autograd.Function):
    """``x @ weight.T`` with one scale a tensor.

    What is kept for the backward pass is the input in 8 bits and the weight itself, which is quantized again: a copy of
    it would keep FSDP from freeing the gathered weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale_x: Tensor,
        scale_weight: Tensor,
        stored_scale: Tensor,
        pending: Tensor | None,
        dtype: torch.dtype,
        plan: Plan,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: of autograd.
            x: of shape (M, K).
            weight: of shape (N, K).
            scale_x: of ``x``.
            scale_weight: of ``weight``.
            stored_scale: of the gradient; 0 where it is to be found from the gradient itself.
            pending: receives the largest value of the gradient.
            dtype: of the result.
            plan: what is computed in which type.
        """
        x8 = None if plan.fprop and plan.wgrad else quantize(x, scale_x, plan.forward)
        ctx.save_for_backward(x if x8 is None or plan.wgrad else x8, weight, scale_x, scale_weight, stored_scale)
        ctx.pending, ctx.plan, ctx.dtype = pending, plan, dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        if x8 is None or plan.fprop:
            return x.to(dtype) @ weight.to(dtype).t()
        weight8 = quantize(weight, scale_weight, plan.forward)
        return multiply(x8, weight8, scale_x.reciprocal(), scale_weight.reciprocal(), dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of ``x`` and ``weight``."""
        x, weight, scale_x, scale_weight, stored_scale = ctx.saved_tensors
        plan: Plan = ctx.plan
        gradient = gradients[0].contiguous()
        amax = largest_value(gradient)
        if ctx.pending is not None:
            ctx.pending.copy_(torch.maximum(ctx.pending, torch.where(torch.isfinite(amax), amax, 0.0)))
        scale = delayed_scale(stored_scale, amax, plan.backward, plan.margin)
        gradient8 = quantize(gradient, scale, plan.backward)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if plan.dgrad:
                grad_x = (gradient.to(ctx.dtype) @ weight.to(ctx.dtype)).to(ctx.x_dtype)
            else:
                weight8 = quantize(weight, scale_weight, plan.forward).t().contiguous()
                grad_x = multiply(gradient8, weight8, scale.reciprocal(), scale_weight.reciprocal(), ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if plan.wgrad:
                grad_weight = (gradient.to(ctx.dtype).t() @ x.to(ctx.dtype)).to(ctx.weight_dtype)
            else:
                rows, columns = gradient8.t().contiguous(), x.t().contiguous()
                grad_weight = multiply(rows, columns, scale.reciprocal(), scale_x.reciprocal(), ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None, None


class RowwiseLinear(torch.autograd.Function):
    """``x @ weight.T`` with a scale for each row of both; so each matrix is quantized along the dimension that is
    summed over.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, plan: Plan) -> Tensor:
        """Multiply.

        Args:
            ctx: of autograd.
            x: of shape (M, K).
            weight: of shape (N, K).
            dtype: of the result.
            plan: what is computed in which type.
        """
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.dtype = plan, dtype
        if plan.fprop:
            return x.to(dtype) @ weight.to(dtype).t()
        return _rowwise(x, weight, plan.forward, plan.forward, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        plan: Plan = ctx.plan
        gradient = gradients[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if plan.dgrad:
                grad_x = (gradient.to(ctx.dtype) @ weight.to(ctx.dtype)).to(x.dtype)
            else:
                grad_x = _rowwise(gradient, weight.t(), plan.backward, plan.forward, x.dtype)
        if ctx.needs_input_grad[1]:
            if plan.wgrad:
                grad_weight = (gradient.to(ctx.dtype).t() @ x.to(ctx.dtype)).to(weight.dtype)
            else:
                grad_weight = _rowwise(gradient.t(), x.t(), plan.backward, plan.forward, weight.dtype)
        return grad_x, grad_weight, None, None


def _rowwise(
    a: Tensor, b: Tensor, type_a: torch.dtype, type_b: torch.dtype, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """``a @ b.T`` with a scale for each row of both."""
    scale_a, scale_b = scale_for(largest_of_rows(a), type_a), scale_for(largest_of_rows(b), type_b)
    a8, b8 = quantize(a, scale_a, type_a).contiguous(), quantize(b, scale_b, type_b).contiguous()
    return multiply(a8, b8, scale_a.reciprocal(), scale_b.reciprocal(), out_dtype, fast)
