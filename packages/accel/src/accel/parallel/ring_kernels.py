"""The kernels of ring attention for devices for which torch has none: the CPU's fused one, and plain products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_state.errors import ConfigurationError

from .._torch_compat import ring_attention_templates

Kernel = Callable[..., Any]


def repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as the queries: ``[batch, heads, length, D]``."""
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _add_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a head that was repeated: the sum of the gradients of its copies."""
    return gradient if gradient.shape == like.shape else gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _cpu_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> Any:
    # Heads are repeated here, not earlier, so that the ring sends every key and value once.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, repeat_heads(key, query), repeat_heads(value, query), **settings)


def _cpu_backward(
    *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = kernel(
        query=query, key=repeat_heads(key, query), value=repeat_heads(value, query), **settings
    )
    return of_query, _add_heads(of_key, key), _add_heads(of_value, value)


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Scaled scores ``[B, H, queries, keys]`` in float32; queries and keys of a causal block are at the same places."""
    scores = query.float() @ repeat_heads(key, query).float().mT
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if not is_causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))


def _plain_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithms of its sums, of products: for devices without a fused kernel."""
    scores = _scores(query, key, is_causal, scale)
    out = scores.softmax(-1) @ repeat_heads(value, query).float()
    return out.to(query.dtype), scores.logsumexp(-1)


def _plain_backward(
    *,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of a block of which the whole row's sums are known: Dao et al., FlashAttention, appendix B.2."""
    gradient = grad_out.float()
    weights = (_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    of_value = weights.mT @ gradient
    of_weights = gradient @ repeat_heads(value, query).float().mT
    of_scores = weights * (of_weights - (gradient * out.float()).sum(-1, keepdim=True))
    of_scores = of_scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    of_query = of_scores @ repeat_heads(key, query).float()
    of_key = of_scores.mT @ query.float()
    return (
        of_query.to(query.dtype),
        _add_heads(of_key, key).to(key.dtype),
        _add_heads(of_value, value).to(value.dtype),
    )


def _kernels(device_type: str) -> tuple[Kernel, Kernel]:
    return (_cpu_forward, _cpu_backward) if device_type == "cpu" else (_plain_forward, _plain_backward)


def _templates() -> tuple[Kernel, Kernel]:
    """Torch's ring, forward and backward, which torch itself uses with its fused kernels only."""
    try:
        return ring_attention_templates()
    except ImportError as error:
        raise ConfigurationError(
            "context parallelism on a device without torch's fused attention, such as the CPU, needs torch 2.10 or "
            f"newer, and this is {torch.__version__}. Upgrade torch, or set cp_size=1."
        ) from error


class Ring(torch.autograd.Function):
    """Torch's ring with kernels that its own dispatcher lacks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        forward, _ = _templates()
        kernel, _ = _kernels(query.device.type)
        ctx.group, ctx.settings = group, {"is_causal": is_causal, "dropout_p": 0.0, "scale": scale}
        out, logsumexp = forward(group, 2, kernel, query=query, key=key, value=value, **ctx.settings)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, backward = _templates()
        query, key, value, out, logsumexp = ctx.saved_tensors
        gradients_of_inputs = backward(
            ctx.group,
            2,
            _kernels(query.device.type)[1],
            grad_out=gradients[0].contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            **ctx.settings,
        )
        return *gradients_of_inputs, None, None, None
