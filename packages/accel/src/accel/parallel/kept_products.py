"""Row-wise products whose sum over the ranks selective activation checkpointing keeps."""

from __future__ import annotations

from typing import Any

import torch

from ..core.kept_results import keep
from .async_products import in_autocast_dtype, product_gradient
from .differentiable import Collective


def kept_product(x: torch.Tensor, matrix: torch.Tensor, reduce: Collective, spread: Collective) -> torch.Tensor:
    """Return ``reduce(x @ matrix)``, which a recomputation takes from the forward pass.

    Args:
        x: this rank's part of the inputs.
        matrix: this rank's rows of the weight.
        reduce: the collective that adds up the products of the ranks.
        spread: the collective that makes the gradient of the product from the gradient of the result.
    """
    output: torch.Tensor = _KeptProduct.apply(*in_autocast_dtype([x, matrix]), reduce, spread)
    return output


class _KeptProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor, reduce: Collective, spread: Collective) -> Any:
        ctx.spread = spread
        ctx.save_for_backward(x, matrix)
        return keep(lambda: reduce(x @ matrix))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        whole = ctx.spread(gradients[0])
        of_x = whole @ matrix.t() if ctx.needs_input_grad[0] else None
        of_matrix = product_gradient(x, whole) if ctx.needs_input_grad[1] else None
        return of_x, of_matrix, None, None
