"""The gradients that an engine holds between a backward pass and its step.

They lie where the ZeRO stage puts them, and not in ``parameter.grad``:

====== ======================================================================================================
stage  gradients
====== ======================================================================================================
0      whole in ``parameter.grad``, summed over ranks at the end of a window
1      whole in ``parameter.grad`` or ``grad_accum``; at the end of a window this rank's part in ``averaged_gradients``
2      this rank's part in ``all_grad_tensors`` and ``averaged_gradients``; with offload in ``accumulated_grads_in_cpu``
3      this rank's part in ``grad_partitions_flat_buffer``
====== ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..fsdp.grad_norm import distinct


def held(engine: Any) -> list[torch.Tensor]:
    """The tensors in which an engine has gradients of the window so far, each piece of memory once."""
    return distinct(_held(engine))


def _held(engine: Any) -> Iterator[torch.Tensor]:
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if gradient is not None:
                yield gradient
    for name in ("all_grad_tensors", "averaged_gradients"):
        for group in _values(getattr(optimizer, name, None)):
            yield from _tensors(group)
    yield from _tensors(_values(getattr(optimizer, "accumulated_grads_in_cpu", None)))
    yield from _tensors([getattr(optimizer, "grad_partitions_flat_buffer", None)])
    # Where 16-bit gradients accumulate in fp32 although nothing is sharded.
    yield from _tensors(getattr(optimizer, "fp32_groups_gradients_flat", None) or ())


def _values(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container or ())


def _tensors(items: Iterable[Any] | None) -> Iterator[torch.Tensor]:
    for item in () if items is None else items:
        if isinstance(item, torch.Tensor):
            yield item


def scale(engine: Any, factor: float | torch.Tensor) -> None:
    """Multiply the gradients of the window so far, in place."""
    for tensor in held(engine):
        tensor.mul_(factor)


def norm(engine: Any) -> torch.Tensor | None:
    """The 2-norm of all gradients of a window that has ended, unscaled; None if it can be known only after the step.

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


def set_clipping(engine: Any, max_norm: float) -> None:
    """Have the engine clip gradients to a norm in its next steps; 0 leaves them as they are."""
    engine._config.gradient_clipping = max_norm
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
