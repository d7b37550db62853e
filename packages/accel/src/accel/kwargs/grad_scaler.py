"""Settings of the loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass

from .base import KwargsHandler


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled with ``mixed_precision="fp16"``; see ``torch.amp.GradScaler``.

    Args:
        init_scale: the first loss scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: what the scale is multiplied by after an overflow.
        growth_interval: optimizer steps without overflow before the scale grows.
        enabled: False leaves losses and gradients unscaled.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
