"""The rendezvous of machines with given ranks, which start and restart their processes together.

Each start is a round. The machine of rank 0 holds a store with the number of the latest round. A machine whose
processes failed requests the next round; the others notice when they monitor their own processes, and all arrive before
anything starts. Each round has a new store for the processes: the former one leads to processes that have ended. In
torch's own static rendezvous each machine restarts alone, and its processes find the former ones of other machines.
"""

from __future__ import annotations

import sys
import time
import uuid
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError, RendezvousTimeoutError

from ..ports import listening_host
from .exit_barrier import ExitBarrier
from .tcp_store import CALL_TIMEOUT, StoreServer, serve

_POLL_SECONDS = 0.05
_SECONDS_BEFORE_NOTE = 5.0
_ROUND = "round"


class StaticRendezvous(RendezvousHandler):
    """Rounds of a fixed number of machines.

    ``port`` is that of the store of rank 0, which the processes also use in the first round; 0 means any free one. The
    stores listen at one address: see :func:`~accel_launch.ports.listening_host`.
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
        self._listening = listening_host(host)
        self._timeout_seconds, self._max_restarts = timeout_seconds, max_restarts
        self._token = uuid.uuid4().hex
        self._control: StoreServer | None = None
        self._rank_server: StoreServer | None = None
        self.store: Store | None = None
        """The store of the machines; None before they have met, and on a single machine."""
        self.round = -1
        """The round that this machine is in; 0 is the first."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the latest round, or request a new one if this machine is in it already; wait for all other machines.

        Raises:
            RendezvousTimeoutError: they did not arrive in time.
            RendezvousClosedError: one of them has ended, or no further round is allowed.
            RendezvousStateError: another launcher uses the rank of this machine.
        """
        if self._world_size == 1:
            self.round += 1
            return self._info(HashStore(), self._serve_ranks())
        if self.store is None:
            self.store = self._connect()
        while True:
            self.round = self._arrive(self.store)
            port = self._wait_for_start(self.store)
            if port:
                return self._info(PrefixStore(str(self.round), self.store), port)

    def _info(self, store: Store, port: int) -> RendezvousInfo:
        return RendezvousInfo(store, self._rank, self._world_size, RendezvousStoreInfo(self._host, port))

    def _connect(self) -> Store:
        if self._rank == 0:
            self._control = serve(self._listening, self._port, forks=self._forks)
            store = self._control.client()
        else:
            timeout = timedelta(seconds=self._timeout_seconds)
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout)
            store.set_timeout(CALL_TIMEOUT)
        return PrefixStore(f"accel/{self._run_id}", store)

    def _serve_ranks(self) -> int:
        """Start the store for the processes of this round, close the former one, and return the port."""
        if self.round == 0 and self._control is not None:
            return self._control.port
        port = self._port if self.round == 0 else 0
        former, self._rank_server = self._rank_server, serve(self._listening, port, forks=self._forks)
        if former is not None:
            former.close()
        return self._rank_server.port

    def _arrive(self, store: Store) -> int:
        """Arrive at the latest round, and return its number."""
        latest = _latest_round(store)
        occupied = self.round < 0 and store.check([self._arrival_key(latest)])
        started = occupied and store.check([f"{latest}/port"])
        if latest == self.round or started:
            latest = int(store.compare_set(_ROUND, str(latest), str(latest + 1)))
        elif occupied:
            # The round has not started: this launcher replaces one that was ended.
            store.set(self._arrival_key(latest), self._token)
        if latest > self._max_restarts:
            reason = "a former launcher started its processes, so this is a restart" if started else "this is a restart"
            raise RendezvousClosedError(
                f"machine rank {self._rank}: {reason}, which --max_restarts {self._max_restarts} does not allow"
            )
        store.compare_set(self._arrival_key(latest), "", self._token)
        self._check_owner(store, latest)
        return latest

    def _check_owner(self, store: Store, number: int) -> None:
        if store.get(self._arrival_key(number)) != self._token.encode():
            raise RendezvousStateError(
                f"another launcher was started with --machine_rank {self._rank}: each machine needs a different rank"
            )

    def _arrival_key(self, number: int, rank: int | None = None) -> str:
        return f"{number}/arrived/{self._rank if rank is None else rank}"

    def _wait_for_start(self, store: Store) -> int:
        """Wait until all machines have arrived; return the port of the processes' store, or 0 if a new round began."""
        key, begin, noted = f"{self.round}/port", time.monotonic(), False
        arrivals = [self._arrival_key(self.round, rank) for rank in range(self._world_size)]
        while True:
            if self._rank == 0 and store.check(arrivals):
                store.set(key, str(self._serve_ranks()))
            self._check_owner(store, self.round)
            if store.check([key]):
                return int(store.get(key))
            if _latest_round(store) > self.round:
                return 0
            ExitBarrier(store, self._rank, self._world_size).raise_if_ended()
            waited = time.monotonic() - begin
            if waited > self._timeout_seconds:
                raise RendezvousTimeoutError(
                    f"{self._missing(store)} did not arrive within {self._timeout_seconds:g} s"
                )
            if waited > _SECONDS_BEFORE_NOTE and not noted:
                noted = True
                text = f"waiting for {self._missing(store)} (up to {self._timeout_seconds:g} s)"
                print(f"accel launch: {text}", file=sys.stderr, flush=True)
            time.sleep(_POLL_SECONDS)

    def _missing(self, store: Store) -> str:
        arrivals = {rank: self._arrival_key(self.round, rank) for rank in range(self._world_size)}
        missing = [str(rank) for rank, key in arrivals.items() if not store.check([key])]
        return f"machine rank {', '.join(missing or ['0'])}"

    def num_nodes_waiting(self) -> int:
        """1 if a round was requested that this machine is not in, else 0."""
        return int(self.store is not None and _latest_round(self.store) > self.round)

    def get_backend(self) -> str:
        """The name of torch's counterpart."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """True: the agent, not rank 0, serves the store of the processes."""
        return True

    def get_run_id(self) -> str:
        """The id of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether a machine has ended."""
        return self.store is not None and ExitBarrier(self.store, self._rank, self._world_size).any_ended()

    def set_closed(self) -> None:
        """Does nothing: machines close the rendezvous through the exit barrier."""

    def shutdown(self) -> bool:
        """Close the stores."""
        self.store = None
        for server in (self._rank_server, self._control):
            if server is not None:
                server.close()
        self._rank_server = self._control = None
        return True


def _latest_round(store: Store) -> int:
    return int(store.compare_set(_ROUND, "", "0"))
