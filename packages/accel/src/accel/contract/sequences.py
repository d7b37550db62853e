"""Sequences that are split over ranks, for strategies with context or sequence parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class Sequences:
    """Sequences that are whole on each rank; a strategy that splits them overrides all three methods."""

    def block(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """Return a block in which buffers are split; see :meth:`accel.Accelerator.maybe_context_parallel`."""
        return nullcontext()

    def whole(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """Gather what was computed from this rank's part of the sequences, such as logits, without a gradient."""
        return tensor

    def split_loader(self, loader: Any, model: nn.Module) -> Any:
        """Return a loader whose batches hold this rank's part of the sequences."""
        return loader
