"""What machines tell one another of how they ended, through a store that all of them reach."""

from __future__ import annotations

import contextlib
import sys
import time

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

SUCCEEDED = "succeeded"
FAILED = "failed"
ENDED = "ended"
"""Told to end, with processes that save what they have; or ended because another machine failed."""

EXIT_BARRIER_SECONDS = 300.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
_STATE_KEY = "accel/exit/"
# One key each, so that looking whether there is any costs the same for any number of machines.
_FIRST_KEYS = {FAILED: "accel/first_failed", SUCCEEDED: "accel/first_ended", ENDED: "accel/first_ended"}


class Ends:
    """How the machines of a run ended, as far as they have.

    Args:
        store: of all machines.
        rank: of this machine.
        world_size: machines.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(world_size) if other != rank]

    def post(self, state: str) -> None:
        """Tell how this machine ended."""
        try:
            self._store.compare_set(_FIRST_KEYS[state], "", str(self._rank))
        except RuntimeError as error:
            # The store lives on the machine of rank 0, which may have ended before.
            reason = str(error).split("\n", 1)[0]
            print(f"accel launch: machine rank 0 cannot be told that this machine {state}: {reason}", file=sys.stderr)
            return
        # By now it may have read that, and have left with the store.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_STATE_KEY}{self._rank}", state)

    def failed(self) -> int | None:
        """The rank of the machine that failed first, if one did."""
        return self._first(FAILED)

    def is_any(self) -> bool:
        """Whether a machine has ended, well or not."""
        return self._first(FAILED) is not None or self._first(ENDED) is not None

    def raise_if_any(self) -> None:
        """Raise RendezvousClosedError if a machine has ended, well or not."""
        for state, what in ((FAILED, "have failed"), (ENDED, "have ended")):
            rank = self._first(state)
            if rank is not None:
                raise RendezvousClosedError(f"the processes of machine rank {rank} {what}, and are not started again")

    def _first(self, state: str) -> int | None:
        key = _FIRST_KEYS[state]
        return int(self._store.get(key)) if self._store.check([key]) else None

    def wait(self) -> list[int]:
        """Wait until every machine has posted how it ended; return the ranks of those that failed, as soon as there is
        one.
        """
        others = self._others
        deadline = time.monotonic() + EXIT_BARRIER_SECONDS
        while others and time.monotonic() < deadline:
            try:
                ended = [other for other in others if self._store.check([f"{_STATE_KEY}{other}"])]
                failed = [other for other in ended if self._store.get(f"{_STATE_KEY}{other}") == FAILED.encode()]
            except RuntimeError:
                # The machine of rank 0, which holds the store, has left: it does so last, unless it died.
                return []
            if failed:
                return failed
            others = [other for other in others if other not in ended]
            time.sleep(_POLL_SECONDS)
        return []

    def let_others_know(self, monitor_seconds: float) -> None:
        """Wait, a little, until every machine has heard of this one's failure: with this process the store may go.

        Args:
            monitor_seconds: how often the others look.
        """
        # Counted in looks: a machine that stood still for a while has not given the others that time.
        left = farewell_seconds(monitor_seconds)
        try:
            while left > 0:
                left -= 2 * _POLL_SECONDS
                # Who has succeeded waits for the others, and looks at how they ended from time to time.
                time.sleep(2 * _POLL_SECONDS)
                if self._store.check([f"{_STATE_KEY}{other}" for other in self._others]):
                    return
        except RuntimeError:
            # The store is another machine's, and gone: so it has ended.
            return


def farewell_seconds(monitor_seconds: float) -> float:
    """How long a machine that ends waits for the others to hear of it.

    Args:
        monitor_seconds: how often they look.
    """
    return monitor_seconds + _ANSWER_SECONDS
