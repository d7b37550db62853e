"""How ranks agree, without a collective, on the step after which all of them stop.

Every rank passes the same sequence of points: the beginning of each loop, and the moments between two steps of loops
that have equally many steps on every rank. Some of these points are open to a stop, and which ones follows from that
sequence alone, so it is the same on all ranks. At an open point each rank asks the store of the process group for the
verdict; the first one there gives it, in one atomic operation: go on, and after how many points the next open one
comes, or stop. No rank waits for another, so a program whose ranks do different things runs as it does without this. A
rank that was told to stop announces that at the next point that nobody has passed.
"""

from __future__ import annotations

import time
from typing import Any

from accel_state import get_logger
from accel_state.errors import ConfigurationError

logger = get_logger(__name__)

INTERVAL_SECONDS = 0.25
"""About how often a rank asks."""

LONGEST_LEASE = 64
"""At most so many steps pass without asking, however quick they were: the ones that follow may be slow."""

_MEETING_PAUSE_SECONDS = 0.02

# An old verdict is deleted when rank 0 is this many open points ahead of it.
_KEPT_VERDICTS = 4096


class StopAgreement:
    """Tells a rank at which of its points to stop.

    Args:
        store: the store of the process group.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._loop: int | None = None
        self._lease = 0
        self._length = 1
        self._steps_left = 0
        self._announced = -1
        self._since = time.monotonic()
        self._lost = False

    def passes(self, loop: int, *, begins: bool, wants_to_stop: bool) -> bool:
        """Pass a point, and say whether to stop there.

        Args:
            loop: which loop the point belongs to.
            begins: whether the loop begins there.
            wants_to_stop: whether this rank was told to.
        """
        self._steps_left -= 1
        if wants_to_stop and self._announced < self._lease:
            self._announced = self._lease
            self._decide("stop")
        if not begins and self._steps_left > 0 and loop == self._loop:
            return False
        return self._ask(loop, begins, wants_to_stop)

    def _ask(self, loop: int, begins: bool, wants_to_stop: bool) -> bool:
        length = 1 if begins or loop != self._loop else self._next_length()
        self._loop = loop
        verdict = self._decide("stop" if wants_to_stop else str(length))
        self._lease += 1
        if verdict == "stop":
            return True
        self._length = self._steps_left = int(verdict)
        self._since = time.monotonic()
        if self._rank == 0 and not self._lost and self._lease > _KEPT_VERDICTS:
            self._store.delete_key(_key(self._lease - _KEPT_VERDICTS))
        return False

    def _next_length(self) -> int:
        seconds_a_step = max((time.monotonic() - self._since) / self._length, 1e-6)
        return max(1, min(2 * self._length, LONGEST_LEASE, int(INTERVAL_SECONDS / seconds_a_step)))

    def _decide(self, proposal: str) -> str:
        """The verdict for the next open point: the proposal, or what another rank was first with."""
        try:
            verdict: bytes = self._store.compare_set(_key(self._lease), "", proposal)
        except RuntimeError as error:
            if not self._lost:
                self._lost = True
                message = (
                    "The store of the process group is gone, so a signal no longer saves the training of all ranks: %s"
                )
                logger.warning(message, error, main_process_only=False)
            return proposal
        return verdict.decode()

    def meet(self, seconds: float) -> list[int]:
        """Wait for the other ranks to stop too.

        Returns:
            The ranks that did not within this time.
        """
        if self._lost:
            return [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.set(f"stopped/{self._rank}", "1")
        deadline = time.monotonic() + seconds
        missing = list(range(self._world_size))
        while True:
            # Read before the store is: this process may have stood still, and the others come meanwhile.
            is_late = time.monotonic() >= deadline
            missing = [rank for rank in missing if not self._store.check([f"stopped/{rank}"])]
            if not missing or is_late:
                return missing
            time.sleep(_MEETING_PAUSE_SECONDS)


def _key(lease: int) -> str:
    return f"point/{lease}"


def agreement_of_world(rank: int, world_size: int) -> StopAgreement | None:
    """The agreement of this process group; None for a single process, which needs none.

    Raises:
        ConfigurationError: the process group has no store.
    """
    if world_size == 1:
        return None
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store = _get_default_store()
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"save_on_signal needs the store of torch's process group, to agree on a step, and there is none: "
            f"{error}. Leave it out, and "
            "save at intervals."
        ) from None
    # A second Accelerator of the same processes counts its points anew.
    count = int(store.add(f"accel/stop_agreements/{rank}", 1))
    return StopAgreement(PrefixStore(f"accel/stop/{count}/", store), rank, world_size)
