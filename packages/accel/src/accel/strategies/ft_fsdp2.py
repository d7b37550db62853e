"""Replicas of several processes, which shard the model with FSDP 2; a replica is restarted as a whole."""

from __future__ import annotations

import torch
from torch import nn

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..core.local_part import local
from .fsdp2 import FSDP2Strategy
from .ft import FaultTolerantStrategy


class FaultTolerantFSDP2Strategy(FaultTolerantStrategy, FSDP2Strategy):
    """Each process of a replica agrees with the same process of the other replicas, which has the same part."""

    skips_gradient_sync = False

    def _check_processes(self, state: PartialState) -> None:
        if not state.use_distributed:
            raise ConfigurationError(
                "strategy 'ft_fsdp2' shards each replica over processes, but this replica has one. Start it with "
                "`accel launch --ft --num_replicas N --use_fsdp --fsdp_version 2 --processes_per_replica M`."
            )

    def _items_of_shard(self) -> float:
        # FSDP averages gradients over the processes, and these are weighted by items.
        items = torch.tensor(self._items, dtype=torch.float64)
        return self.state.collectives.all_reduce(items).item() / self.state.num_processes

    def _set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            parameter.grad = None
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient)
