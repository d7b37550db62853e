"""The rendezvous of a fixed number of machines, which start and restart their processes together.

Each start is a round. The launchers see each other's records on a board (:mod:`accel_launch.network.board`). A machine
whose processes failed posts that it waits for the next round; the others notice when they monitor their own processes,
and all arrive before anything starts. Each round has a new store for the processes: the former one leads to processes
that have ended. In torch's own static rendezvous each machine restarts alone, and its processes find the former ones of
other machines.

With ``--rdzv_backend c10d`` the launcher at the main address has machine rank 0, and assigns the others theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError, RendezvousTimeoutError

from ..network.board import QUIET_SECONDS, Board, Hub, Member, say
from ..network.peers import Waiting
from ..network.records import ANY_RANK, Cause, Machine, State
from .meeting import Meeting, Meetings

_SLICE_SECONDS = 0.5
_SHOWN = 8


class StaticRendezvous(Meetings):
    """Rounds of a fixed number of machines."""

    board: Board | None
    round: int

    def meet(self) -> Meeting:
        """Join the latest round, or request a new one if this machine is in it already; wait for all other machines.

        A failure counts as one restart, even if it makes several machines fail.

        Raises:
            RendezvousTimeoutError: they did not arrive in time.
            RendezvousClosedError: one of them has ended, or no further round is allowed.
            RendezvousStateError: another launcher uses the rank of this machine.
            ConfigurationError: the machines disagree, or one of them cannot start.
        """
        if self._job.num_machines == 1:
            self.round += 1
            port = self._serve_ranks(self._port if self.round == 0 else 0)
        else:
            if self.board is None:
                given = self._job.rendezvous.rdzv_backend == "static"
                self.board = self._join(self._rank) if given else self._join_without_rank(ANY_RANK)
            self._arrive(self.board)
            port = self._wait_for_start(self.board)
        sizes = [self._job.local_processes] * self._job.num_machines
        return Meeting(self._rank, self._host, port, self.round, sizes)

    @property
    def _rank(self) -> int:
        return self._job.rendezvous.machine_rank if self.board is None else self.board.me.rank

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _arrive(self, board: Board) -> None:
        """Post that this machine waits for the latest round, once it has a rank."""
        if self._rank == ANY_RANK:
            return
        own = self.round + 1 if board.me.started else max(self.round, 0)
        latest = max([own, *(_needed_round(machine, board.me) for machine in board.others())])
        max_restarts = self._job.rendezvous.max_restarts
        if latest > max_restarts:
            joins = not board.me.started and self.round < 0
            reason = "a former launcher started its processes, so this is a restart" if joins else "this is a restart"
            raise RendezvousClosedError(
                f"machine rank {self._rank}: {reason}, which --max_restarts {max_restarts} does not allow"
            )
        if latest != self.round or board.me.started:
            self.round = latest
            board.post(round=latest, members={}, port=0, state=State.WAITING)

    def _wait_for_start(self, board: Board) -> int:
        """Wait until all machines have arrived, and return the port of the processes' store."""
        waiting = Waiting(self._timeout_seconds, say)
        while True:
            version = board.version
            self._check(board)
            self._arrive(board)
            port = self._begin(board) if self._rank == 0 else self._follow(board)
            if port:
                return port
            if waiting.is_over:
                raise RendezvousTimeoutError(
                    f"not within {self._timeout_seconds:g} s: waited for {self._missing(board)}"
                )
            waiting.note(lambda: self._missing(board))
            board.wait_for_change(version, _SLICE_SECONDS)

    def _check(self, board: Board) -> None:
        """Raise an error if there is nothing to wait for."""
        board.raise_if_refused()
        if isinstance(board, Member) and (reason := board.hopeless()):
            raise RendezvousStateError(reason)
        for machine in board.others():
            if machine.state.is_final:
                board.raise_if_refused()  # it may have come with the record of this machine, after the first look
                verb = "failed" if machine.state is State.FAILED else "ended"
                reason = f": {machine.cause.text}" if machine.cause is not None else ""
                raise RendezvousClosedError(
                    f"the processes of machine rank {machine.rank} {verb} and are not started again{reason}"
                )

    def _has_arrived(self) -> bool:
        assert self.board is not None
        machines = self.board.machines()
        return len(machines) == self._job.num_machines and all(
            machine.round == self.round and not machine.started and self.board.silent(machine.rank) < QUIET_SECONDS
            for machine in machines.values()
        )

    def _begin(self, board: Board) -> int:
        """On machine rank 0: start the round if all have arrived, and return the port; else 0."""
        if not (isinstance(board, Hub) and self._has_arrived()) or board.refusal is not None:
            return 0
        port = self._serve_ranks()
        members = {str(rank): machine.id for rank, machine in board.machines().items()}
        board.post(members=members, port=port, state=State.RUNNING)
        return port

    def _follow(self, board: Board) -> int:
        """On other machines: the port of this round's store, once rank 0 has started it; else 0."""
        main = board.machines().get(0)
        if main is None or main.round != self.round or main.members.get(str(self._rank)) != board.me.id:
            return 0
        board.post(members=main.members, state=State.RUNNING)
        return main.port

    def _missing(self, board: Board) -> str:
        """Return who is here and who is not, for a message."""
        if isinstance(board, Member) and not board.met:
            return f"the machine of rank 0 at {self.place}: {board.problem}"
        machines = board.machines()
        if self._rank == ANY_RANK:
            return f"one of the {self._job.num_machines} machines at {self.place} to be gone, whose place it takes"
        here = [
            rank
            for rank, machine in machines.items()
            if machine.round == self.round and board.silent(rank) < QUIET_SECONDS
        ]
        names = [
            f"{machines[rank].named()}, no heartbeat for {board.silent(rank):.0f} s"
            if rank in machines and board.silent(rank) >= QUIET_SECONDS
            else f"machine rank {rank}"
            for rank in range(self._job.num_machines)
            if rank not in here
        ]
        arrived = [f"{rank} ({machines[rank].host})" for rank in sorted(here)]
        return f"{_some(names) or 'machine rank 0 to start the processes'}; here: {_some(arrived)}"

    def is_awaited(self) -> bool:
        if self.board is None:
            return False
        me = self.board.me
        return any(
            me.members.get(str(machine.rank), machine.id) != machine.id or machine.round > self.round
            for machine in self.board.others()
        )

    def withdraw(self, cause: Cause) -> None:
        board = self.board
        if board is not None and board.refusal is None and not board.me.started:
            # First the refusal: others that only see a failed machine take it for one whose processes had run.
            if isinstance(board, Hub) and self.round <= 0:
                board.refuse(f"{board.me.named()}: {cause.text}", cause.code)
            board.post(state=State.FAILED, cause=cause)
        self.leave()


def _some(texts: Sequence[str]) -> str:
    """Return the first of many texts, and how many more there are."""
    left = len(texts) - _SHOWN
    return ", ".join([*texts[:_SHOWN], *([f"{left} more"] if left > 0 else [])])


def _needed_round(machine: Machine, me: Machine) -> int:
    """Return the earliest round that this machine can take part in with another one."""
    counts_on_me = machine.members.get(str(me.rank)) == me.id
    return machine.round + 1 if machine.started and not counts_on_me else machine.round
