"""Attention over sequences that ranks share: torch's ring, with kernels for the CPU too, and refusals of what it would compute wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from accel_state.errors import ConfigurationError

Kernel = Callable[..., Any]


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _add_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of repeating: the gradient of a head is the sum of those of its copies."""
    return gradient if gradient.shape == like.shape else gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _forward_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> Any:
    # Heads are repeated here and not earlier, so that the ring carries every key and value once.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _repeat_heads(key, query), _repeat_heads(value, query), **settings)


def _backward_kernel(*, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = kernel(query=query, key=_repeat_heads(key, query), value=_repeat_heads(value, query), **settings)
    return of_query, _add_heads(of_key, key), _add_heads(of_value, value)


def _templates() -> tuple[Kernel, Kernel]:
    """Torch's ring, which it uses with kernels of accelerators only."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError as error:
        raise ConfigurationError(
            f"context parallelism on the CPU needs torch 2.10 or newer, and this is {torch.__version__}. Upgrade torch, or set cp_size=1."
        ) from error
    return _attention._templated_ring_attention, _attention._templated_ring_attention_backward


class _RingOnCPU(torch.autograd.Function):
    """Torch's ring with the CPU's flash kernels: its own dispatcher does not know them."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        forward, _ = _templates()
        ctx.group, ctx.settings = group, {"is_causal": is_causal, "dropout_p": 0.0, "scale": scale}
        out, logsumexp = forward(group, 2, _forward_kernel, query=query, key=key, value=value, **ctx.settings)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, backward = _templates()
        query, key, value, out, logsumexp = ctx.saved_tensors
        found = backward(
            ctx.group,
            2,
            _backward_kernel,
            grad_out=gradients[0].contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            **ctx.settings,
        )
        return *found, None, None, None


class RingAttention:
    """Stands for ``scaled_dot_product_attention`` while ranks share sequences.

    Args:
        mesh: the ranks that share a sequence.
        inner: the function that torch's ``context_parallel`` has put in its place.

    Attributes:
        calls: how often it has been called.
        closed: whether the block in which it may be used has ended.
    """

    def __init__(self, mesh: DeviceMesh, inner: Callable[..., torch.Tensor]) -> None:
        self.mesh = mesh
        self.inner = inner
        self.calls = 0
        self.closed = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Causal attention of this rank's queries to the keys and values of the whole sequences: shapes ``[B, H, length / cp, D]``.

        Raises:
            ConfigurationError: a mask, dropout, or attention that is not causal.
        """
        self.calls += 1
        _check_call(query, key, attn_mask, dropout_p, is_causal)
        if query.device.type == "cpu":
            out: torch.Tensor = _RingOnCPU.apply(query, key, value, self.mesh.get_group(), is_causal, scale)
        else:
            key, value = _repeat_heads(key, query), _repeat_heads(value, query)
            with _fused_kernels():
                out = self.inner(query, key, value, is_causal=is_causal, scale=scale)
        if out.requires_grad:
            out.register_hook(self._check_open)
        return out

    def _check_open(self, gradient: torch.Tensor) -> None:
        if self.closed:
            raise ConfigurationError(
                "backward was called after the block of maybe_context_parallel: the backward pass sends keys and values around too, and "
                "needs the block. Call accelerator.backward(loss) inside of it."
            )


def _check_call(query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool) -> None:
    advice = "Train this model with cp_size=1, or with sp_size, which shares the heads instead."
    if attn_mask is not None:
        raise ConfigurationError(
            f"scaled_dot_product_attention got a mask of shape {tuple(attn_mask.shape)} where ranks share sequences; the ring computes "
            f"causal attention without a mask. Leave padding at the end and attention_mask out. {advice}"
        )
    if not is_causal or query.shape[2] != key.shape[2]:
        raise ConfigurationError(
            f"scaled_dot_product_attention got is_causal={is_causal} with {query.shape[2]} queries and {key.shape[2]} keys where ranks "
            f"share sequences; the ring computes causal attention of a sequence to itself. {advice}"
        )
    if dropout_p:
        raise ConfigurationError(
            f"scaled_dot_product_attention got dropout_p={dropout_p} where ranks share sequences; the ring has no dropout. Set the model's "
            "attention dropout to 0 (attention_dropout, attn_pdrop)."
        )


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Only kernels that the ring knows: the others would attend to this rank's part, in silence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unknown = {"ERROR", "MATH", "OVERRIDEABLE"}
    with sdpa_kernel([backend for name, backend in SDPBackend.__members__.items() if name not in unknown]):
        yield


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[RingAttention]:
    """Put ring attention in the place of ``torch.nn.functional.scaled_dot_product_attention``, inside torch's own ``context_parallel``."""
    inner = functional.scaled_dot_product_attention
    ring = RingAttention(mesh, inner)
    functional.scaled_dot_product_attention = ring
    try:
        yield ring
    finally:
        functional.scaled_dot_product_attention = inner
        ring.closed = True
