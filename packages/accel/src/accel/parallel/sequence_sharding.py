"""What a strategy does where ranks of its mesh share sequences."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .config import ParallelismConfig
from .context_parallel import ContextParallel
from .ulysses import SequenceParallel


class SharesSequences:
    """The part of a mesh strategy that is about sequences.

    Attributes:
        ring: context parallelism; None where its axis has one rank.
        heads: sequence parallelism; None where its axis has one rank.
    """

    ring: ContextParallel | None = None
    heads: SequenceParallel | None = None

    def init_sequences(self, mesh: DeviceMesh | None, settings: ParallelismConfig) -> None:
        """Set the sharing up, as far as there are axes for it."""
        if mesh is not None and settings.cp_handler is not None and settings.cp_enabled:
            self.ring = ContextParallel(mesh["cp"], settings.cp_handler.cp_comm_strategy or "allgather")
        if mesh is not None and settings.sp_handler is not None and settings.sp_enabled:
            self.heads = SequenceParallel(mesh["sp"], settings.sp_handler)

    def share_sequences(self, model: nn.Module) -> None:
        """Have a model told which parts of sequences it gets; before it is wrapped."""
        for sharing in (self.ring, self.heads):
            if sharing is not None:
                sharing.adapt(model)

    def context_parallel(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """A block in which the ranks of the cp axis share the sequences in the buffers."""
        return nullcontext() if self.ring is None else self.ring.block(buffers, buffer_seq_dims, no_restore_buffers)

    def whole_sequences(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """The parts of the ranks of the cp or sp axis as one, on each of them."""
        sharing = self.ring or self.heads
        return tensor if sharing is None else sharing.unshard(tensor, seq_dim)

    def sequence_parallel_loader(self, loader: Any, model: nn.Module) -> Any:
        """A loader whose sequences are split between the ranks of the sp axis."""
        return loader if self.heads is None else self.heads.loader(loader)
