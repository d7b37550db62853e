"""The gradients of an engine between a backward pass and its optimizer step.

Where they are stored depends on the ZeRO stage:

====== =====================================================================================================
stage  gradients
====== =====================================================================================================
0      unsharded in ``parameter.grad``, all-reduced at the end of a window
1      unsharded in ``parameter.grad`` or ``grad_accum``; at the end of a window a shard in ``averaged_gradients``
2      a shard in ``all_grad_tensors`` and ``averaged_gradients``; with offload in ``accumulated_grads_in_cpu``
3      a shard in ``grad_partitions_flat_buffer``
====== =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.grad_norm import distinct


def gradient_tensors(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that hold an engine's gradients of the current window, each storage once."""
    optimizer = engine.optimizer
    found: list[Any] = []
    for parameter in engine.module.parameters():
        found += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for name in ("all_grad_tensors", "averaged_gradients"):
        for group in _values(getattr(optimizer, name, None)):
            found += [] if group is None else list(group)
    found += _values(getattr(optimizer, "accumulated_grads_in_cpu", None))
    found.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    # Used by 16-bit optimizers that accumulate in fp32 without sharding.
    found += list(getattr(optimizer, "fp32_groups_gradients_flat", None) or ())
    return distinct(tensor for tensor in found if isinstance(tensor, torch.Tensor))


def _values(container: Any) -> Iterable[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container or ())


def scale_gradients(engine: Any, factor: float | torch.Tensor) -> None:
    """Multiply the gradients of the current window, in place."""
    for tensor in gradient_tensors(engine):
        tensor.mul_(factor)


def gradient_norm(engine: Any) -> torch.Tensor | None:
    """Return the unscaled 2-norm of all gradients of a finished window; None if known only after the step.

    Every rank must call it.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_get_norm_groups"):  # stage 3
        groups = [group.float() for group in optimizer._get_norm_groups()]
        scaled = torch.linalg.vector_norm(torch.stack(groups))
    elif hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        scaled = optimizer.scaled_global_norm()
    else:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        if not gradients:
            return None
        scaled = nn.utils.get_total_norm(gradients)
    return (scaled / getattr(optimizer, "loss_scale", 1.0)).detach()


@contextmanager
def norm_known(engine: Any, norm: float | None) -> Iterator[None]:
    """Let a step of stage 1 or 2 use the norm that clipping has computed already: it costs collectives."""
    optimizer = engine.optimizer
    if norm is None or hasattr(optimizer, "_get_norm_groups") or not hasattr(optimizer, "scaled_global_norm"):
        yield
        return
    scaled = torch.tensor(norm * getattr(optimizer, "loss_scale", 1.0), dtype=torch.float32, device=engine.device)
    optimizer.scaled_global_norm = lambda *_, **__: scaled
    try:
        yield
    finally:
        del optimizer.scaled_global_norm


def set_clipping(engine: Any, max_norm: float) -> None:
    """Have the engine clip gradients to a norm in its next steps; 0 disables clipping."""
    engine._config.gradient_clipping = max_norm
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
