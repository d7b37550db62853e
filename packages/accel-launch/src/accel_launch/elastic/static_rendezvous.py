"""The rendezvous of machines whose ranks are given: they start their processes together, and again whenever one of them
asks for it.

Each start is a round. The machine of rank 0 holds a store with the number of the latest round. A machine whose
processes failed asks for the next round, the others see it when they look at their own processes, and all arrive there
before anything starts. The store of the processes is a new one in each round: what they left in a former one leads to
processes that are gone. torch's own static rendezvous has no rounds: each machine starts again alone, and the processes
meet the others' former ones.
"""

from __future__ import annotations

import sys
import time
import uuid
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError, RendezvousTimeoutError

from .exit_barrier import Ends
from .tcp_store import CALL_TIMEOUT, Server, serve

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0
_ROUND = "round"


class RoundsRendezvous(RendezvousHandler):
    """Rounds of a fixed number of machines.

    Args:
        host: address of the machine of rank 0.
        port: port of its store, which the processes use too in the first round; 0 for any free one, on a single
            machine.
        rank: of this machine.
        world_size: machines.
        run_id: what they call this run.
        timeout_seconds: how long they wait for one another.
        max_restarts: rounds after the first.
        forks: whether the processes of this machine are forked from this one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout_seconds: float,
        max_restarts: int,
        *,
        forks: bool,
    ) -> None:
        self._host, self._port, self._run_id, self._forks = host, port, run_id, forks
        self._rank, self._world_size = rank, world_size
        self._timeout_seconds, self._max_restarts = timeout_seconds, max_restarts
        self._token = uuid.uuid4().hex
        self._control: Server | None = None
        self._served: Server | None = None
        self._store: Store | None = None
        self.round = -1
        """The round that this machine is in; 0 is the first."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Go to the latest round, asking for one if this machine is in it already, and wait there for all others.

        Raises:
            RendezvousTimeoutError: they did not come in time.
            RendezvousClosedError: one of them has ended, or no further round is allowed.
            RendezvousStateError: another launcher goes by the rank of this machine.
        """
        if self._world_size == 1:
            self.round += 1
            return self._info(HashStore(), self._serve_ranks())
        if self._store is None:
            self._store = self._connect()
        while True:
            self.round = self._arrive(self._store)
            port = self._start(self._store)
            if port:
                return self._info(PrefixStore(str(self.round), self._store), port)

    def _info(self, store: Store, port: int) -> RendezvousInfo:
        return RendezvousInfo(store, self._rank, self._world_size, RendezvousStoreInfo(self._host, port))

    def _connect(self) -> Store:
        if self._rank == 0:
            self._control = serve(self._port, forks=self._forks)
            store = self._control.client()
        else:
            timeout = timedelta(seconds=self._timeout_seconds)
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout)
            store.set_timeout(CALL_TIMEOUT)
        return PrefixStore(f"accel/{self._run_id}", store)

    def _serve_ranks(self) -> int:
        """The port of a store for the processes of this round; the former one is given up."""
        if self.round == 0 and self._control is not None:
            return self._control.port
        former, self._served = self._served, serve(self._port if self.round == 0 else 0, forks=self._forks)
        if former is not None:
            former.close()
        return self._served.port

    def _arrive(self, store: Store) -> int:
        """Arrive at the latest round, and return its number."""
        latest = _latest(store)
        occupied = self.round < 0 and store.check([self._place(latest)])
        again = occupied and store.check([f"{latest}/port"])
        if latest == self.round or again:
            latest = int(store.compare_set(_ROUND, str(latest), str(latest + 1)))
        elif occupied:
            # The round has not begun: a launcher that was ended, and started again, takes its place.
            store.set(self._place(latest), self._token)
        if latest > self._max_restarts:
            reason = "its processes were started by a former launcher" if again else "they would be started"
            raise RendezvousClosedError(
                f"machine rank {self._rank}: {reason} again, and --max_restarts {self._max_restarts} does not allow it"
            )
        store.compare_set(self._place(latest), "", self._token)
        self._check_place(store, latest)
        return latest

    def _check_place(self, store: Store, number: int) -> None:
        if store.get(self._place(number)) != self._token.encode():
            raise RendezvousStateError(
                f"another launcher was started with --machine_rank {self._rank}: each machine needs a rank of its own"
            )

    def _place(self, number: int, rank: int | None = None) -> str:
        return f"{number}/arrived/{self._rank if rank is None else rank}"

    def _start(self, store: Store) -> int:
        """The port of the processes' store, as soon as all machines have arrived; 0 where a later round was asked for
        meanwhile.
        """
        key, begin, noted = f"{self.round}/port", time.monotonic(), False
        places = [self._place(self.round, rank) for rank in range(self._world_size)]
        while True:
            if self._rank == 0 and store.check(places):
                store.set(key, str(self._serve_ranks()))
            self._check_place(store, self.round)
            if store.check([key]):
                return int(store.get(key))
            if _latest(store) > self.round:
                return 0
            Ends(store, self._rank, self._world_size).raise_if_any()
            waited = time.monotonic() - begin
            if waited > self._timeout_seconds:
                raise RendezvousTimeoutError(f"{self._missing(store)} did not come within {self._timeout_seconds:g} s")
            if waited > _PATIENCE_SECONDS and not noted:
                noted = True
                print(
                    f"accel launch: waiting for {self._missing(store)} (up to {self._timeout_seconds:g} s)",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_POLL_SECONDS)

    def _missing(self, store: Store) -> str:
        ranks = [str(rank) for rank in range(self._world_size) if not store.check([self._place(self.round, rank)])]
        return f"machine rank {', '.join(ranks or ['0'])}"

    @property
    def ends(self) -> Store | None:
        """Where machines post how they ended; None before they have met, and on a single one."""
        return self._store

    def num_nodes_waiting(self) -> int:
        """1 if a round was asked for that this machine is not in, else 0."""
        return int(self._store is not None and _latest(self._store) > self.round)

    def get_backend(self) -> str:
        """The name of torch's counterpart."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """The processes find their store served; rank 0 of them serves none."""
        return True

    def get_run_id(self) -> str:
        """What the machines call this run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether a machine has ended."""
        return self._store is not None and Ends(self._store, self._rank, self._world_size).is_any()

    def set_closed(self) -> None:
        """Nothing: a machine that ends posts how it ended."""

    def shutdown(self) -> bool:
        """Let go of the stores."""
        self._store = None
        for server in (self._served, self._control):
            if server is not None:
                server.close()
        self._served = self._control = None
        return True


def _latest(store: Store) -> int:
    """The number of the latest round that was asked for."""
    return int(store.compare_set(_ROUND, "", "0"))
