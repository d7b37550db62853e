"""A stand-in for DistributedDataParallel, whose reducer needs real memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ReplicatedModel(nn.Module):
    """Broadcasts buffers before the forward, and all-reduces gradients in the backward, of passes that synchronise.

    It all-reduces each parameter separately; DDP uses buckets, which send the same bytes in fewer calls.

    Args:
        module: the model.
        process_group: the ranks that hold a copy each (default: all).
        broadcast_buffers: send rank 0's buffers to the other ranks before each forward.
        **settings: further settings of DDP, which do not change the number of bytes.
    """

    def __init__(
        self, module: nn.Module, process_group: Any = None, broadcast_buffers: bool = True, **settings: Any
    ) -> None:
        super().__init__()
        self.module = module
        self.group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.synchronises = True
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: torch.Tensor) -> None:
        if self.synchronises and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.synchronises:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=self.group, group_src=0)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True
