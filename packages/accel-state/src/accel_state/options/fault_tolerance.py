"""Replicas of a fault-tolerant run: how many there are, and when one counts as dead."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from .declaration import OptionGroup, option

_replicas = functools.partial(option, env_prefix="ACCELERATE_FT_", section="ft_config", exported=True)


@dataclass(frozen=True)
class FaultToleranceOptions(OptionGroup):
    """Replicas that keep training when some of them are killed."""

    title = "fault tolerance"
    description = "Used with --ft."
    enabled_by: ClassVar[tuple[str, Any] | None] = ("ft", True)

    num_replicas: int = _replicas(
        2,
        minimum=1,
        help="Number of replicas, which share every global batch. While some are dead, the others compute their "
        "share: the global batch, and so the result, stays the same.",
    )
    num_spares: int = _replicas(
        0, minimum=0, help="Number of further replicas that stand by, and take the share of a dead one at once."
    )
    processes_per_replica: int = _replicas(
        1,
        minimum=1,
        metavar="N",
        help="Processes of a replica, over which --use_fsdp --fsdp_version 2 shards its model. A replica is restarted "
        "as a whole.",
    )
    min_replicas: int = _replicas(
        1, minimum=1, help="Number of live replicas below which the run waits for dead ones to return."
    )
    replica_timeout: float = _replicas(
        60.0,
        minimum=0.5,
        metavar="SECONDS",
        help="Seconds without progress after which a replica that hangs, while others wait for it, counts as dead, and "
        "is killed and restarted.",
    )
    heartbeat_timeout: float = _replicas(
        1.0,
        minimum=0.2,
        metavar="SECONDS",
        help="Seconds without a heartbeat after which a replica counts as dead. Heartbeats do not depend on the "
        "script, so this may be much shorter than a step.",
    )
