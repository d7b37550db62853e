"""Ranks that try the same thing, and must agree on whether it worked, although some may have failed in the middle."""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta

import torch.distributed as dist

from ._torch_compat import connect_again
from .hang_reports import HangWatch

_CALL_TIMEOUT = timedelta(seconds=60)
_POLL_SECONDS = 0.05
_numbers = itertools.count()


def outcomes_of_ranks(failure: str) -> list[str]:
    """Return how the attempt ended on each rank, once it has ended on all; every rank must call it after each attempt.

    Ranks meet in the store: one that failed in the middle may have left a collective to the others, which no other
    collective can follow.

    Args:
        failure: why it failed on this rank; empty if it did not.

    Returns:
        The failures by rank; that of this rank alone if there is no process group with a server.

    Raises:
        RuntimeError: it failed on this rank, and the ranks that have not ended it wait for this one, or have left.
    """
    store = connect_again(_CALL_TIMEOUT) if dist.is_available() and dist.is_initialized() else None
    if store is None:
        return [failure]
    rank, world_size, number = dist.get_rank(), dist.get_world_size(), next(_numbers)
    store = dist.PrefixStore(f"accel/attempts/{number}", store)
    store.set(str(rank), json.dumps(failure))
    found: dict[int, str] = {}
    while len(found) < world_size:
        missing = [other for other in range(world_size) if other not in found]
        found |= {other: json.loads(store.get(str(other))) for other in missing if store.check([str(other)])}
        report, idle = HangWatch.latest
        if failure and len(found) < world_size and idle.issuperset(set(range(world_size)) - set(found) | {rank}):
            raise RuntimeError(report)
        time.sleep(_POLL_SECONDS)
    return [found[other] for other in range(world_size)]
