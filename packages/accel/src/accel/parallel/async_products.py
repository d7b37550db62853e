"""Products of tensor-parallel layers that overlap with their communication (asynchronous tensor parallelism).

The all-gather before the first layers of a module and the reduce-scatter after its last one travel in pieces, each of
which is multiplied while the next one is on its way. torch has operators for both, over symmetric memory of GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import ConfigurationError

from .._torch_compat import symmetric_products
from .sequence_collectives import summed_rows


def check_devices(device: torch.device, ranks: int, ranks_on_node: int) -> None:
    """Refuse devices without symmetric memory.

    Args:
        device: of this rank.
        ranks: of the tensor-parallel axis.
        ranks_on_node: processes on this node.

    Raises:
        ConfigurationError: it is not a CUDA device, or the axis spans several nodes.
    """
    if device.type != "cuda":
        raise ConfigurationError(
            f"enable_async_tp=True needs CUDA devices, whose symmetric memory torch uses, and this run is on "
            f"{device.type}. Leave it out."
        )
    if ranks_on_node % ranks:
        raise ConfigurationError(
            f"enable_async_tp=True needs the {ranks} ranks of tp on one node, and there are {ranks_on_node} processes "
            "on this one. Choose a tp_size that divides them, or leave it out."
        )


class OverlappedProducts:
    """Products of hidden states ``[batch, length, width]`` that are sharded along the sequence.

    Args:
        mesh: the tensor-parallel axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        symmetric_products(mesh.get_group())  # every rank of the axis

    def gathered(self, x: torch.Tensor, matrices: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All-gather along the sequence, and the product with each matrix ``[width, outputs]``.

        Returns:
            The gathered hidden states, and the products.
        """
        outputs: tuple[torch.Tensor, ...] = _GatheredProducts.apply(self.mesh, *in_autocast_dtype([x, *matrices]))
        return outputs

    def scattered(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of the sum over the ranks of ``x @ matrix``."""
        output: torch.Tensor = _ScatteredProduct.apply(self.mesh, *in_autocast_dtype([x, matrix]))
        return output


def in_autocast_dtype(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in the dtype of the current autocast, which does not cast for functions and torch's operators."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


def product_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a matrix from its input and the gradient of its product."""
    # In the form in which torch computes that of a linear layer's weight: the other one may round otherwise.
    return (gradient.flatten(0, 1).t() @ x.flatten(0, 1)).t()


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, x: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = mesh.get_group()
        whole, products = symmetric_products(group).fused_all_gather_matmul(x, list(matrices), 1, group.group_name)
        ctx.mesh = mesh
        ctx.save_for_backward(whole, *matrices)
        ctx.set_materialize_grads(False)
        return whole, *products

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        whole, *matrices = ctx.saved_tensors
        of_whole, *of_products = gradients
        group = ctx.mesh.get_group()
        pairs = [(grad, m.t()) for grad, m in zip(of_products, matrices, strict=True) if grad is not None]
        own = None
        if ctx.needs_input_grad[1]:
            if pairs:
                joined, stacked = torch.cat([grad for grad, _ in pairs], -1), torch.cat([matrix for _, matrix in pairs])
                scatter = symmetric_products(group).fused_matmul_reduce_scatter
                own = scatter(joined, stacked, "sum", 1, group.group_name)
            if of_whole is not None:
                rest = summed_rows(of_whole, ctx.mesh)
                own = rest if own is None else own + rest
        of_matrices = [
            product_gradient(whole, grad) if needed and grad is not None else None
            for grad, needed in zip(of_products, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, own, *of_matrices


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        group = mesh.get_group()
        ctx.mesh = mesh
        ctx.save_for_backward(x, matrix)
        scatter = symmetric_products(group).fused_matmul_reduce_scatter
        output: torch.Tensor = scatter(x, matrix, "sum", 1, group.group_name)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        group = ctx.mesh.get_group()
        gather = symmetric_products(group).fused_all_gather_matmul
        whole, (own,) = gather(gradients[0], [matrix.t()], 1, group.group_name)
        return None, own, product_gradient(x, whole) if ctx.needs_input_grad[2] else None
