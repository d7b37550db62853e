"""How ranks agree, without a collective, on the step after which all of them stop.

Every rank passes the same sequence of points: the beginning of each loop, and the moments between two steps of loops
that have the same number of steps on every rank. A run can stop at some of these points, the open ones; which ones
follows from the sequence alone, so they are the same on all ranks. At an open point each rank reads the decision from
the store of the process group. The first rank there makes it, in one atomic operation: stop, or continue for a number
of points until the next open one. No rank waits for another, so ranks that do different things are not slowed down. A
rank that received a signal decides to stop at the next point that no rank has passed.
"""

from __future__ import annotations

import time
from typing import Any, Final

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .._torch_compat import default_store, quiet_cpp_logs

logger: Final = get_logger(__name__)

INTERVAL_SECONDS = 0.25
"""Approximate time between two reads of the store."""

LONGEST_LEASE = 64
"""Most steps between two reads of the store, however fast they are: the following ones may be slow."""

_MEETING_PAUSE_SECONDS = 0.02
_SIGNAL_SECONDS = 1.0

# Rank 0 deletes the decision of the open point this many before its own.
_KEPT_DECISIONS = 4096

_STOP = "stop"


class StopAgreement:
    """Decides at which point a rank stops."""

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
        self.lost: bool = False
        """Whether the store no longer answers."""

    def passes(self, loop: int, *, begins: bool, wants_to_stop: bool) -> bool:
        """Pass a point, and return whether to stop there."""
        self._steps_left -= 1
        if wants_to_stop:
            self._announce()
        if not begins and self._steps_left > 0 and loop == self._loop:
            return False
        length = 1
        if not begins and loop == self._loop:
            seconds_a_step = max((time.monotonic() - self._since) / self._length, 1e-6)
            length = max(1, min(2 * self._length, LONGEST_LEASE, int(INTERVAL_SECONDS / seconds_a_step)))
        self._loop = loop
        decision = self._decide(_STOP if wants_to_stop else str(length))
        self._lease += 1
        if decision == _STOP:
            return True
        if wants_to_stop:
            self._announce()  # now: at that point another rank may be the first again
        self._length = self._steps_left = int(decision)
        self._since = time.monotonic()
        if self._rank == 0 and not self.lost and self._lease > _KEPT_DECISIONS:
            self._store.delete_key(_key(self._lease - _KEPT_DECISIONS))
        return False

    def _announce(self) -> None:
        """Decide to stop at the next open point, unless another rank has passed it."""
        if self._announced < self._lease:
            self._announced = self._lease
            self._decide(_STOP)

    def _decide(self, proposal: str) -> str:
        """Return the decision at the next open point: the proposal, or that of another rank that was there first."""
        try:
            with quiet_cpp_logs():
                decision: bytes = self._store.compare_set(_key(self._lease), "", proposal)
        except RuntimeError as error:
            if not self.lost:
                self.lost = True
                if proposal != _STOP:
                    # If the launcher was killed, the kernel is about to send a signal, whose handler says more.
                    time.sleep(_SIGNAL_SECONDS)
                message = "The store of the process group is lost, so a signal no longer saves the training: %s"
                logger.warning(message, error, main_process_only=False)
            return proposal
        return decision.decode()

    def meet(self, seconds: float) -> list[int]:
        if self.lost:
            return [rank for rank in range(self._world_size) if rank != self._rank]
        missing = list(range(self._world_size))
        deadline = time.monotonic() + seconds
        try:
            with quiet_cpp_logs():
                self._store.set(f"stopped/{self._rank}", "1")
                while True:
                    # Checked before the store is read: this process may have been suspended while the others arrived.
                    is_late = time.monotonic() >= deadline
                    missing = [rank for rank in missing if not self._store.check([f"stopped/{rank}"])]
                    if not missing or is_late:
                        return missing
                    time.sleep(_MEETING_PAUSE_SECONDS)
        except RuntimeError:
            self.lost = True
            return missing

    def answers(self) -> bool:
        """Return True if the store answers."""
        try:
            with quiet_cpp_logs():
                self._store.check([_key(self._lease)])
        except RuntimeError:
            self.lost = True
        return not self.lost


def _key(lease: int) -> str:
    return f"point/{lease}"


def stop_agreement(rank: int, world_size: int) -> StopAgreement | None:
    """Return the agreement of this process group; None for a single process."""
    if world_size == 1:
        return None
    from torch.distributed import PrefixStore

    try:
        store = default_store()
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigurationError(
            f"save_on_signal needs the store of torch's process group to agree on a step, and there is none: {error}. "
            "Leave save_on_signal out, and save at intervals."
        ) from None
    # A second Accelerator in the same processes counts its points from zero.
    count = int(store.add(f"accel/stop_agreements/{rank}", 1))
    return StopAgreement(PrefixStore(f"accel/stop/{count}/", store), rank, world_size)
