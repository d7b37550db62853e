"""Settings of automatic mixed precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import KwargsHandler


@dataclass
class AutocastKwargs(KwargsHandler):
    """How ``torch.autocast`` runs, in prepared models and in :meth:`accel.Accelerator.autocast`.

    Args:
        enabled: False computes in full precision.
        cache_enabled: whether autocast keeps the converted weights until it ends; None leaves it to torch.
        outputs_to_fp32: whether a prepared model's half-precision outputs come out as float32. Turn it off to keep large
            outputs (logits, images) in the precision they were computed in.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    outputs_to_fp32: bool = True

    def to_autocast(self) -> dict[str, Any]:
        """The arguments for ``torch.autocast``."""
        return {"enabled": self.enabled, "cache_enabled": self.cache_enabled}
