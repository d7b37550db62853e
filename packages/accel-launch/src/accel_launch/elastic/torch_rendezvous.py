"""Meetings through torch's rendezvous (c10d), which assigns the ranks of the machines.

Once the machines have met, their launchers see each other on a board, as with given ranks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError

from ..network.board import Board
from ..network.contact import say, token_of_run
from ..network.hub import Hub
from ..network.member import Member
from ..network.records import Cause, Machine, State
from ..network.waiting import Waiting
from ..ports import is_local, listening_host, wait_for_server
from .meeting import Meeting, Meetings
from .tcp_store import StoreServer, serve

_BOARD_KEY, _RANKS_KEY = "accel/port_of_board", "accel/port_of_ranks"
# Those that torch's rendezvous has brought together connect within moments.
_JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class TorchRendezvous(Meetings):
    """torch's rendezvous.

    Args:
        parameters: where and how long.
        host: of the server that holds its state.
        port: of that server.
        timeout_seconds: how long to wait for the other machines.
        local_processes: ranks of this machine.
        facts: what the machines must agree on.
        machine_timeout: when a silent machine is given up; 0 for never.
        forks: whether ranks are forks of this process.
    """

    may_hang = True

    def __init__(
        self,
        parameters: RendezvousParameters,
        host: str,
        port: int,
        timeout_seconds: float,
        *,
        local_processes: int,
        facts: Mapping[str, str],
        machine_timeout: float,
        forks: bool,
    ) -> None:
        self._parameters, self._place, self._timeout_seconds = parameters, (host, port), timeout_seconds
        self._local_processes, self._facts, self._machine_timeout = local_processes, facts, machine_timeout
        self._forks = forks
        self._handler: RendezvousHandler | None = None
        self._board: Board | None = None
        self._server: StoreServer | None = None
        self.run_id: str = parameters.run_id

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
        port = self._serve_ranks(info, host)
        board = self._join_others(info, host) if info.world_size > 1 else None
        former, self._board = self._board, board
        if former is not None:
            former.post(state=State.LEFT)
            former.close(0)
        return Meeting(info.rank, info.world_size, host, port, restarts, board)

    def _connect(self) -> RendezvousHandler:
        """Connect to the server that holds the state, once it listens.

        torch would wait in one long call that no signal interrupts.
        """
        host, port = self._place
        seconds = self._timeout_seconds
        if not is_local(host) and not wait_for_server(host, port, seconds):
            raise RendezvousTimeoutError(f"no server listened there for {seconds:g} s")
        return get_rendezvous_handler(self._parameters)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A block that waits for other machines, during which a thread says so."""
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
        low, high = self._parameters.min_nodes, self._parameters.max_nodes
        machines = f"{high}" if low == high else f"{low} to {high}"
        host, port = self._place
        lost = [] if self._board is None else [machine.named() for machine, _ in self._board.lost()]
        reason = f", after the loss of {', '.join(lost)}" if lost else ""
        return f"{machines} machines to meet at {host}:{port}; here: {socket.gethostname()}{reason}"

    def _serve_ranks(self, info: RendezvousInfo, host: str) -> int:
        """Serve the store of the ranks on the machine of rank 0, which torch's rendezvous does not; return its port."""
        # Kept until all machines have met again: ranks that still run on other machines would fail without it.
        former, self._server = self._server, None
        if info.rank == 0:
            self._server = serve(listening_host(host), 0, forks=self._forks)
            info.store.set(_RANKS_KEY, str(self._server.port))
        port = int(info.store.get(_RANKS_KEY))
        if former is not None:
            former.close()
        return port

    def _join_others(self, info: RendezvousInfo, host: str) -> Board:
        """The board of this meeting, once all machines are on it."""
        board = self._join(info, host)
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

    def _join(self, info: RendezvousInfo, host: str) -> Board:
        """Join the board, which the machine of rank 0 serves on a free port, and announces through the store."""
        me = Machine(
            info.rank,
            uuid.uuid4().hex,
            socket.gethostname(),
            self._local_processes,
            facts=self._facts,
            round=0,
            state=State.RUNNING,
        )
        token, give_up = token_of_run(), self._machine_timeout
        if info.rank == 0:
            hub = Hub(me, listening_host(host), 0, token, info.world_size, give_up, say)
            info.store.set(_BOARD_KEY, str(hub.port))
            return hub
        return Member(me, (host, int(info.store.get(_BOARD_KEY))), token, give_up, say)

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
        if self._server is not None:
            self._server.close()
        if self._board is not None:
            self._board.close()
