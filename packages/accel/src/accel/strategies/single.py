"""Training in one process."""

from __future__ import annotations

from ..contract.strategy import Strategy
from ..reduction.shard_reduction import ShardReduction


class SingleStrategy(Strategy):
    """A model on one device; the base class implements it."""

    supports_elastic = True

    def reduce_in_order(self) -> ShardReduction:
        return ShardReduction(self.averaging_collectives)
