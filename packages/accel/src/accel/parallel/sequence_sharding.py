"""Splitting of sequences over the ranks of a mesh, by context or sequence parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .config import ParallelismConfig
from .context_parallel import ContextParallel
from .ulysses import SequenceParallel


class SequenceSharding:
    """The axes of a mesh that sequences are split over; it does nothing where there are none."""

    def __init__(self, mesh: DeviceMesh | None, settings: ParallelismConfig) -> None:
        self.context: ContextParallel | None = None
        self.ulysses: SequenceParallel | None = None
        if mesh is not None and settings.cp_handler is not None and settings.cp_enabled:
            self.context = ContextParallel(mesh["cp"], settings.cp_handler.cp_comm_strategy or "allgather")
        if mesh is not None and settings.sp_handler is not None and settings.sp_enabled:
            self.ulysses = SequenceParallel(mesh["sp"], settings.sp_handler)

    def prepare_model(self, model: nn.Module) -> None:
        """Correct the inputs of a model's calls, and its attention; before it is wrapped."""
        for axis in (self.context, self.ulysses):
            if axis is not None:
                axis.prepare_model(model)

    def block(
        self,
        buffers: list[torch.Tensor] | None,
        seq_dims: list[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """A block in which the sequences in the buffers are split over the ranks of the cp axis."""
        return nullcontext() if self.context is None else self.context.block(buffers, seq_dims, no_restore)

    def unshard(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """The full sequences on every rank of the cp or sp axis."""
        axis = self.context or self.ulysses
        return tensor if axis is None else axis.unshard(tensor, seq_dim)

    def loader(self, loader: Any) -> Any:
        """A loader whose sequences are split over the ranks of the sp axis."""
        return loader if self.ulysses is None else self.ulysses.loader(loader)
