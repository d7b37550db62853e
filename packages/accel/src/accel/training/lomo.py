"""LOMO and AdaLomo (package lomo-optim): optimizers that update each weight during the backward pass.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
https://arxiv.org/abs/2306.09782
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel_state.errors import ConfigurationError


def fused_optimizers(optimizers: Iterable[Any]) -> list[Any]:
    """Return the prepared optimizers that update weights in the backward pass."""
    inner = (getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers)
    return [optimizer for optimizer in inner if callable(getattr(optimizer, "fused_backward", None))]


def fused_backward(optimizers: Iterable[Any], loss: torch.Tensor, learning_rate: float | None) -> None:
    """Compute gradients and update weights in one pass."""
    fused = fused_optimizers(optimizers)
    if not fused:
        raise ConfigurationError(
            "no prepared optimizer updates weights in the backward pass. Prepare a Lomo or AdaLomo optimizer (pip "
            "install lomo-optim), or call accelerator.backward(loss) without learning_rate."
        )
    if learning_rate is None:
        names = ", ".join(type(optimizer).__name__ for optimizer in fused)
        raise ConfigurationError(
            f"{names} needs the learning rate in the backward pass. Call accelerator.backward(loss, learning_rate=...)."
        )
    for optimizer in fused:
        optimizer.fused_backward(loss, learning_rate)
