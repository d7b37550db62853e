"""Training in one process."""

from __future__ import annotations

from accel_state.collectives.single import Collectives

from ..contract.strategy import Strategy
from ..reduction.shard_reduction import ShardReduction


class SingleStrategy(Strategy):
    """A model on one device; the base class implements it."""

    supports_several_processes = False
    supports_elastic = True
    trains_nf4 = True
    checkpoints_blocks = True
    averages_weights = True

    @property
    def matrix_collectives(self) -> Collectives:
        return self.state.collectives

    def reduce_in_order(self) -> ShardReduction:
        return ShardReduction(self.averaging_collectives)
