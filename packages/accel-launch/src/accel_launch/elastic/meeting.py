"""What the agent starts, and what it needs of a rendezvous: where machines have met, and whether they must again."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from accel_state.errors import ConfigurationError
from accel_state.options.rendezvous import RendezvousOptions
from accel_state.options.resources import MachineRange
from accel_state.ports import DEFAULT_PORT, LOOPBACK, is_free, is_local, listening_host
from accel_state.tcp_store import serve_store

from ..network.board import SHUTDOWN_SECONDS, Board, join
from ..network.peers import DEFAULT_TIMEOUT_SECONDS, timeout_seconds
from ..network.records import Cause, State
from ..supervisor import GRACE_SECONDS
from .tcp_store import CALL_TIMEOUT, ForkedStoreServer

_LEAVING_SECONDS = 1.0


class RunEnded(RendezvousClosedError):
    """The run has ended with success, without this machine."""


@dataclass(frozen=True)
class ElasticJob:
    """What the agent of this machine starts."""

    entrypoint: str | Callable[..., Any]  # an executable, or a function that each rank calls
    args: Sequence[Any]  # its arguments
    local_processes: int  # ranks on this machine
    num_machines: int  # machines
    rendezvous: RendezvousOptions  # how they meet
    debug: bool = False  # whether the agent's log is shown
    start_method: str = "spawn"  # how processes of a function are created: "fork" or "spawn"
    line_prefix: str | None = None  # template of the prefix of each line of ``--tee``; None for role and local rank
    run_id: str | None = None  # id of the job, the same on all machines; None for the default
    owns_process: bool = True  # see :class:`SignalWatch`
    facts: Mapping[str, str] = field(default_factory=dict)  # what the machines must agree on
    # where the output of executables goes: the options of these names
    tee: str = "0"
    redirects: str = "0"
    local_ranks_filter: str | None = None
    grace_seconds: float = GRACE_SECONDS  # how long ranks may take to end after SIGTERM
    # Where machines have no given ranks: whether the main address is this one's; None to find out.
    serves: bool | None = None

    @property
    def forks(self) -> bool:
        """True if ranks are forks of this process."""
        return callable(self.entrypoint) and self.start_method == "fork"


@dataclass(frozen=True)
class Meeting:
    """Where the machines have met for a start of the ranks."""

    rank: int  # of this machine
    address: str  # of the store of the ranks
    port: int
    restarts: int  # of the run, so far
    sizes: Sequence[int]  # ranks of each machine
    news: str = ""  # why the ranks are started again, if the rendezvous knows
    is_failure: bool = True  # whether they are because a process failed


class Meetings(ABC):
    """The meetings of a run: one before each start of the ranks.

    The launchers meet at the main address. The store of the ranks of each start has a free port, and listens at one
    address: see :func:`~accel_state.ports.listening_host`.
    """

    def __init__(self, job: ElasticJob) -> None:
        alone, options = job.num_machines == 1, job.rendezvous
        self._job = job
        self._host = options.main_process_ip if options.main_process_ip and not alone else LOOPBACK
        self._port = options.main_process_port or (0 if alone else DEFAULT_PORT)
        self._timeout_seconds = timeout_seconds(options.rdzv_conf) if options.rdzv_conf else DEFAULT_TIMEOUT_SECONDS
        self._rank_server: TCPStore | ForkedStoreServer | None = None
        self.place: str = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        """The main address and port; on a single machine port 0 stands for any free one."""
        self.run_id: str = job.run_id or (uuid.uuid4().hex if alone else "none")
        """The id of the job; several machines need the same one."""
        self.board: Board | None = None
        """What the launchers know of each other; None before they have met, and on a single machine."""
        self.round: int = -1
        """The start that the ranks belong to, as the other machines count; 0 is the first."""

    may_shrink = False
    """Whether the run continues without machines that are lost or leave, and counts restarts itself."""

    def may_leave(self, number: int) -> bool:
        """Return True if the others continue when this signal ends the launcher; 0 is no signal."""
        return False

    def may_save(self) -> bool:
        """Return True if the ranks can still save between two steps: those of all other machines run."""
        return False

    def _join(self, rank: int) -> Board:
        """Join the board of the run with a machine rank."""
        job, machines = self._job, self._job.num_machines
        return join(
            self._host,
            self._port,
            rank,
            machines.minimum if isinstance(machines, MachineRange) else machines,
            local_processes=job.local_processes,
            facts=job.facts,
            give_up_seconds=job.rendezvous.machine_timeout,
        )

    def _join_without_rank(self, number: int) -> Board:
        """Join the board with rank 0 if this launcher is the first one at the main address, else with ``number``."""
        serves = self._job.serves
        if serves is None:
            serves = is_local(self._host) and is_free(self._port, listening_host(self._host))
        try:
            return self._join(0 if serves else number)
        except ConfigurationError:
            if self._job.serves is not None:
                raise
            return self._join(number)  # another launcher on this machine was faster

    def _serve_ranks(self, port: int = 0) -> int:
        """Start the store for the next start of the ranks, close the former one, and return the port."""
        former, host = self._rank_server, listening_host(self._host)
        try:
            if self._job.forks:
                self._rank_server = ForkedStoreServer(host, port)
            else:
                self._rank_server = serve_store(host, port, CALL_TIMEOUT)  # its thread ends with the last reference
        except (OSError, RuntimeError) as error:
            raise RendezvousConnectionError(f"a store cannot listen on port {port}: {error}") from error
        if isinstance(former, ForkedStoreServer):
            former.close()
        return int(self._rank_server.port)

    @abstractmethod
    def meet(self) -> Meeting:
        """Wait for all other machines.

        Raises:
            RendezvousError: of torch, with the reason why the machines did not meet.
            ConfigurationError: the machines disagree, or one of them cannot start.
        """

    @abstractmethod
    def is_awaited(self) -> bool:
        """Return True if another machine needs a meeting: it has joined, or asks for a restart."""

    @abstractmethod
    def withdraw(self, cause: Cause) -> None:
        """Leave after an error of this launcher, and tell the others why."""

    def leave(self) -> None:
        """Leave, and close the store of the ranks."""
        board, self.board = self.board, None
        if board is not None:
            # A machine that leaves does not wait for those that stay.
            board.close(_LEAVING_SECONDS if board.me.state is State.LEFT else SHUTDOWN_SECONDS)
        if isinstance(self._rank_server, ForkedStoreServer):
            self._rank_server.close()
        self._rank_server = None
