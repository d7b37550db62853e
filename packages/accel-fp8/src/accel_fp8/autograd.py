"""Autograd functions of linear layers with products in 8 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .matmul import multiply
from .scaling import delayed_scale, largest_of_rows, largest_value, quantize, scale_for


class LinearPrecision(NamedTuple):
    """The dtypes of a linear layer's three products."""

    forward: torch.dtype  # 8-bit dtype of inputs and weights
    backward: torch.dtype  # 8-bit dtype of output gradients
    fprop: bool = False  # compute the output in higher precision
    dgrad: bool = False  # compute the input's gradient in higher precision
    wgrad: bool = False  # compute the weight's gradient in higher precision
    margin: int = 0  # powers of two of headroom above the largest value


class TensorwiseLinear(torch.autograd.Function):
    """``x @ weight.T`` with one scale per tensor.

    The backward pass uses the saved input in 8 bits and quantizes the weight again, because a saved copy would defeat
    FSDP's freeing of gathered weights.
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
        precision: LinearPrecision,
    ) -> Tensor:
        """Multiply ``x`` of shape (M, K) and ``weight`` of shape (N, K), with a result of ``dtype``.

        ``stored_scale`` is that of the output gradient (0 computes it from the gradient), whose largest value is
        written to ``pending``.
        """
        x8 = None if precision.fprop and precision.wgrad else quantize(x, scale_x, precision.forward)
        ctx.save_for_backward(x if x8 is None or precision.wgrad else x8, weight, scale_x, scale_weight, stored_scale)
        ctx.pending, ctx.precision, ctx.dtype = pending, precision, dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        if x8 is None or precision.fprop:
            return x.to(dtype) @ weight.to(dtype).t()
        weight8 = quantize(weight, scale_weight, precision.forward)
        return multiply(x8, weight8, scale_x.reciprocal(), scale_weight.reciprocal(), dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, scale_x, scale_weight, stored_scale = ctx.saved_tensors
        precision: LinearPrecision = ctx.precision
        gradient = gradients[0].contiguous()
        amax = largest_value(gradient)
        if ctx.pending is not None:
            ctx.pending.copy_(torch.maximum(ctx.pending, torch.where(torch.isfinite(amax), amax, 0.0)))
        scale = delayed_scale(stored_scale, amax, precision.backward, precision.margin)
        gradient8 = quantize(gradient, scale, precision.backward)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if precision.dgrad:
                grad_x = (gradient.to(ctx.dtype) @ weight.to(ctx.dtype)).to(ctx.x_dtype)
            else:
                weight8 = quantize(weight, scale_weight, precision.forward).t().contiguous()
                grad_x = multiply(gradient8, weight8, scale.reciprocal(), scale_weight.reciprocal(), ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            if precision.wgrad:
                grad_weight = (gradient.to(ctx.dtype).t() @ x.to(ctx.dtype)).to(ctx.weight_dtype)
            else:
                rows, columns = gradient8.t().contiguous(), x.t().contiguous()
                grad_weight = multiply(rows, columns, scale.reciprocal(), scale_x.reciprocal(), ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None, None


class RowwiseLinear(torch.autograd.Function):
    """``x @ weight.T`` with one scale per row; each product quantizes both matrices along its inner dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, precision: LinearPrecision) -> Tensor:
        """Multiply ``x`` of shape (M, K) and ``weight`` of shape (N, K), with a result of ``dtype``."""
        ctx.save_for_backward(x, weight)
        ctx.precision, ctx.dtype = precision, dtype
        if precision.fprop:
            return x.to(dtype) @ weight.to(dtype).t()
        return _rowwise(x, weight, precision.forward, precision.forward, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight = ctx.saved_tensors
        precision: LinearPrecision = ctx.precision
        gradient = gradients[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if precision.dgrad:
                grad_x = (gradient.to(ctx.dtype) @ weight.to(ctx.dtype)).to(x.dtype)
            else:
                grad_x = _rowwise(gradient, weight.t(), precision.backward, precision.forward, x.dtype)
        if ctx.needs_input_grad[1]:
            if precision.wgrad:
                grad_weight = (gradient.to(ctx.dtype).t() @ x.to(ctx.dtype)).to(weight.dtype)
            else:
                grad_weight = _rowwise(gradient.t(), x.t(), precision.backward, precision.forward, weight.dtype)
        return grad_x, grad_weight, None, None


def _rowwise(
    a: Tensor, b: Tensor, dtype_a: torch.dtype, dtype_b: torch.dtype, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Compute ``a @ b.T`` with one scale per row of both."""
    scale_a, scale_b = scale_for(largest_of_rows(a), dtype_a), scale_for(largest_of_rows(b), dtype_b)
    a8, b8 = quantize(a, scale_a, dtype_a).contiguous(), quantize(b, scale_b, dtype_b).contiguous()
    return multiply(a8, b8, scale_a.reciprocal(), scale_b.reciprocal(), out_dtype, fast)
