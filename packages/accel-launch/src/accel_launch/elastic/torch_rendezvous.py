"""Meetings through torch's rendezvous (c10d), which assigns the ranks of the machines.

Once the machines have met, their launchers see each other on a board, as with given ranks.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import uuid
from collections.abc import Iterator

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.ports import is_local, is_loopback, listening_host, wait_for_server

from ..network.board import Board, Hub, Member, say, token_of_run
from ..network.interfaces import own_address
from ..network.peers import Waiting, rendezvous_settings
from ..network.records import Cause, Machine, State
from .meeting import ElasticJob, Meeting, Meetings
from .tcp_store import serve

_BOARD_KEY, _RANKS_KEY = "accel/port_of_board", "accel/port_of_ranks"
# Those that torch's rendezvous has brought together connect within moments.
_JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class TorchRendezvous(Meetings):
    """torch's rendezvous."""

    may_hang = True
    board: Board | None

    def __init__(self, job: ElasticJob) -> None:
        super().__init__(job)
        self.round: int = 0
        self._handler: RendezvousHandler | None = None

    def meet(self, restarts: int) -> Meeting:
        with self._waiting():
            if self._handler is None:
                self._handler = self._connect()
            try:
                # Otherwise torch keeps one store for the ranks of all rounds, from which gloo would read the addresses
                # of ranks that have ended, and of which a machine that joins later is not told.
                with patch_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
                    info = self._handler.next_rendezvous()
            except RendezvousGracefulExitError:
                raise ConfigurationError(
                    "the rendezvous was closed by another machine before this one joined. Start all machines again."
                ) from None
        assert info.bootstrap_store_info is not None
        host = info.bootstrap_store_info.master_addr
        port = self._share_ranks_port(info, host)
        board = self._join_others(info, host) if info.world_size > 1 else None
        former, self.board = self.board, board
        if former is not None:
            former.post(state=State.LEFT)
            former.close(0)
        return Meeting(info.rank, info.world_size, host, port, restarts, board)

    def _connect(self) -> RendezvousHandler:
        """Connect to the server that holds the state, once it listens.

        torch would wait in one long call that no signal interrupts.
        """
        seconds, options = self._timeout_seconds, self._job.rendezvous
        if not is_local(self._host) and not wait_for_server(self._host, self._port, seconds):
            raise RendezvousTimeoutError(f"no server listened there for {seconds:g} s")
        parameters = RendezvousParameters(
            backend=options.rdzv_backend,
            endpoint=self.place,
            run_id=self.run_id,
            min_nodes=self._job.num_machines,
            max_nodes=self._job.num_machines,
            local_addr=_reachable_address(self._host),
            # What c10d calls it, in whole seconds.
            **{"join_timeout": str(math.ceil(seconds)), **rendezvous_settings(options.rdzv_conf)},
        )
        return get_rendezvous_handler(parameters)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Report from a thread that the block waits for other machines."""
        ended = threading.Event()
        waiting = Waiting(self._timeout_seconds, say)

        def run() -> None:
            while not ended.wait(_LOOK_SECONDS):
                waiting.note(self._missing)

        thread = threading.Thread(target=run, name="accel-launch-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _missing(self) -> str:
        lost = [] if self.board is None else [machine.named() for machine, _ in self.board.lost()]
        reason = f", after the loss of {', '.join(lost)}" if lost else ""
        return f"{self._job.num_machines} machines to meet at {self.place}; here: {socket.gethostname()}{reason}"

    def _share_ranks_port(self, info: RendezvousInfo, host: str) -> int:
        """Serve the store of the ranks on the machine of rank 0, which torch's rendezvous does not; return its port."""
        # Kept until all machines have met again: ranks that still run on other machines would fail without it.
        former, self._rank_server = self._rank_server, None
        if info.rank == 0:
            self._rank_server = serve(listening_host(host), 0, forks=self._job.forks)
            info.store.set(_RANKS_KEY, str(self._rank_server.port))
        port = int(info.store.get(_RANKS_KEY))
        if former is not None:
            former.close()
        return port

    def _join_others(self, info: RendezvousInfo, host: str) -> Board:
        """Return the board of this meeting, once all machines are on it."""
        board = self._join_meeting(info, host)
        try:
            board.wait(lambda: board.refusal is not None or len(board.machines()) == info.world_size, _JOIN_SECONDS)
            board.raise_if_refused()
            if len(board.machines()) < info.world_size:
                problem = board.problem if isinstance(board, Member) and not board.met else "other machines are missing"
                raise RendezvousTimeoutError(f"the launchers did not connect to each other: {problem}")
        except BaseException:
            board.close()
            raise
        return board

    def _join_meeting(self, info: RendezvousInfo, host: str) -> Board:
        """Join the board, which the machine of rank 0 serves on a free port, and announces through the store."""
        me = Machine(
            info.rank,
            uuid.uuid4().hex,
            socket.gethostname(),
            self._job.local_processes,
            facts=self._job.facts,
            round=0,
            state=State.RUNNING,
        )
        token, give_up = token_of_run(), self._job.rendezvous.machine_timeout
        if info.rank == 0:
            hub = Hub(me, listening_host(host), 0, token, info.world_size, give_up)
            info.store.set(_BOARD_KEY, str(hub.port))
            return hub
        return Member(me, (host, int(info.store.get(_BOARD_KEY))), token, give_up)

    def is_awaited(self) -> bool:
        return self._handler is not None and self._handler.num_nodes_waiting() > 0

    def withdraw(self, cause: Cause) -> None:
        # torch's handler would call into a store that may be gone.
        self._close()

    def leave(self) -> None:
        self._close()
        if self._handler is not None:
            self._handler.shutdown()

    def _close(self) -> None:
        self._close_store()
        if self.board is not None:
            self.board.close()


def _reachable_address(main: str) -> str | None:
    """Return the address of this machine from which it reaches the main one; None for torch's choice, its host name.

    A machine whose own name or main address resolves to 127.0.1.1 has none that the name tells.
    """
    try:
        address = own_address(main)
    except OSError:
        return None  # no route now; the rendezvous reports it
    return None if is_loopback(address) and not is_loopback(main) else address
