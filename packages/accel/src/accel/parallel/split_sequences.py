"""Sequences split over the ranks of the cp or the sp axis of a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..contract.sequences import Sequences
from .context_parallel import ContextParallel
from .ulysses import SequenceParallel, SplitLoader


class SplitSequences(Sequences):
    """Splits sequences in a block (cp) or in the loader (sp); only one of the axes is larger than 1."""

    def __init__(self, context: ContextParallel | None, ulysses: SequenceParallel | None) -> None:
        self.context = context
        self.ulysses = ulysses

    def block(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        if self.context is None:
            return super().block(buffers, buffer_seq_dims, no_restore_buffers)
        return self.context.block(buffers, buffer_seq_dims, no_restore_buffers)

    def whole(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        axis = self.context or self.ulysses
        return tensor if axis is None else axis.unshard(tensor, seq_dim)

    def split_loader(self, loader: Any, model: nn.Module) -> Any:
        return loader if self.ulysses is None else SplitLoader(self.ulysses, loader)
