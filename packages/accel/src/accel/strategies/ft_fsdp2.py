"""Replicas of several processes, which shard the model with FSDP 2; a replica is restarted as a whole."""

from __future__ import annotations

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from .fsdp2 import FSDP2Strategy
from .ft import FaultTolerantStrategy


class FaultTolerantFSDP2Strategy(FaultTolerantStrategy, FSDP2Strategy):
    """Each process of a replica agrees with the same process of the other replicas, which has the same part."""

    supports_single_process = True  # for _check_processes, whose error tells how to start a replica
    skips_gradient_sync = False

    def _check_processes(self, state: PartialState) -> None:
        if not state.use_distributed:
            raise ConfigurationError(
                "strategy 'ft_fsdp2' shards each replica over processes, but this replica has one. Start it with "
                "`accel launch --ft --num_replicas N --use_fsdp --fsdp_version 2 --processes_per_replica M`."
            )
