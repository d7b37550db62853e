"""Shares each machine's exit status through a store that all machines reach."""

from __future__ import annotations

import contextlib
import sys
import time

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

SUCCEEDED = "succeeded"
FAILED = "failed"
ENDED = "ended"
"""Ended by a signal with processes that save on it, or because another machine failed."""

EXIT_BARRIER_SECONDS = 300.0
_POLL_SECONDS = 0.2
_NOTICE_SECONDS = 5.0
_STATE_KEY = "accel/exit/"
# A single key each, so that a look costs the same for any number of machines.
_FIRST_KEYS = {FAILED: "accel/first_failed", SUCCEEDED: "accel/first_ended", ENDED: "accel/first_ended"}


class ExitBarrier:
    """The exit status of every machine that has ended."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(world_size) if other != rank]

    def post(self, state: str) -> None:
        """Publish how this machine ended."""
        try:
            self._store.compare_set(_FIRST_KEYS[state], "", str(self._rank))
        except RuntimeError as error:
            # The machine of rank 0, which holds the store, may have ended.
            reason = str(error).split("\n", 1)[0]
            print(f"accel launch: machine rank 0 cannot be told that this machine {state}: {reason}", file=sys.stderr)
            return
        # It may also end between the two calls, having read the first.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_STATE_KEY}{self._rank}", state)

    def first_failed(self) -> int | None:
        """The rank of the machine that failed first, or None."""
        return self._first(FAILED)

    def any_ended(self) -> bool:
        """Whether a machine has ended, with or without a failure."""
        return self._first(FAILED) is not None or self._first(ENDED) is not None

    def raise_if_ended(self) -> None:
        """Raise RendezvousClosedError if a machine has ended, with or without a failure."""
        for state, verb in ((FAILED, "failed"), (ENDED, "ended")):
            rank = self._first(state)
            if rank is not None:
                raise RendezvousClosedError(f"the processes of machine rank {rank} {verb} and are not started again")

    def _first(self, state: str) -> int | None:
        key = _FIRST_KEYS[state]
        return int(self._store.get(key)) if self._store.check([key]) else None

    def wait(self) -> list[int]:
        """Wait until every machine has ended, or one has failed; return the ranks of those that failed."""
        others = self._others
        deadline = time.monotonic() + EXIT_BARRIER_SECONDS
        while others and time.monotonic() < deadline:
            try:
                ended = [other for other in others if self._store.check([f"{_STATE_KEY}{other}"])]
                failed = [other for other in ended if self._store.get(f"{_STATE_KEY}{other}") == FAILED.encode()]
            except RuntimeError:
                # The machine of rank 0, which holds the store, leaves last unless it was killed.
                return []
            if failed:
                return failed
            others = [other for other in others if other not in ended]
            time.sleep(_POLL_SECONDS)
        return []

    def wait_until_noticed(self, monitor_seconds: float) -> None:
        """Wait a few seconds until the other machines have seen this failure: the store may go with this process."""
        # Counted in looks: time during which this machine was suspended does not count.
        remaining = farewell_seconds(monitor_seconds)
        try:
            while remaining > 0:
                remaining -= 2 * _POLL_SECONDS
                time.sleep(2 * _POLL_SECONDS)
                if self._store.check([f"{_STATE_KEY}{other}" for other in self._others]):
                    return
        except RuntimeError:
            # The store's machine has ended, so it has noticed.
            return


def farewell_seconds(monitor_seconds: float) -> float:
    """How long a machine that ends waits for the others to notice, given their monitor interval."""
    return monitor_seconds + _NOTICE_SECONDS
