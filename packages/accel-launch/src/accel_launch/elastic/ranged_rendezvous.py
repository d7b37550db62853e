"""The rendezvous of a range of machines (``--num_machines 2:8``), which come and go while the run continues.

The launcher of the machine at the main address decides: it begins a start when enough machines wait for it, and posts
who takes part, and so which ranks each has. A machine that arrives later waits until that launcher has its ranks save
between two steps; then all machines meet again. A start needs that launcher, so that machines that a network separates
cannot both continue. If it is lost, the others wait until it is started again, at the same address.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterable, Mapping

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStateError, RendezvousTimeoutError

from accel_state.errors import ConfigurationError
from accel_state.humanize import counted
from accel_state.options.resources import MachineRange
from accel_state.ports import is_local

from ..network.board import QUIET_SECONDS, Board, Hub, Member, say
from ..network.interfaces import own_address
from ..network.peers import Waiting, rendezvous_settings
from ..network.records import FIRST_SEAT, INTERRUPTED, Cause, Machine, State
from .meeting import ElasticJob, Meeting, Meetings, RunEnded
from .short_lives import ShortLives

_SLICE_SECONDS = 0.5
# A launcher whose network fails connects again within a second, once the network is back.
_CLOSED_SECONDS = 5.0
# How long a start waits for more machines, after one has arrived.
_LAST_CALL_SECONDS = "5"


class RangedRendezvous(Meetings):
    """Starts of a number of machines between a minimum and a maximum."""

    may_shrink = True
    board: Board | None
    round: int

    def __init__(self, job: ElasticJob) -> None:
        super().__init__(job)
        assert isinstance(job.num_machines, MachineRange)
        self._machines: MachineRange = job.num_machines
        settings = rendezvous_settings(job.rendezvous.rdzv_conf)
        self._last_call_seconds = check_last_call(settings.get("last_call_timeout", _LAST_CALL_SECONDS))
        self._members: dict[str, str] = {}  # ids by number of the machines of that start, in the order of their ranks
        self._names: dict[str, str] = {}  # and what they are called, by id
        self._main_id = ""  # the launcher at the main address that began it
        self._restarts = self._told_restarts = 0
        self._calls = False  # whether the machines meet because others have arrived
        self._arrivals: dict[str, float] = {}  # when each launcher was first seen to wait
        self._told = ""
        self._short_lives = ShortLives()

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _join_range(self) -> Board:
        number = FIRST_SEAT + uuid.uuid4().int % (1 << 30)
        board = self._join_without_rank(number)
        board.after_loss = self._after_loss
        if isinstance(board, Hub):
            board.closed_seconds = _CLOSED_SECONDS
            self._arrivals[board.me.id] = time.monotonic()
            if is_local(self._host):
                board.own_address = own_address(self._host)  # also before another machine connects
                board.post(address=board.own_address)
        return board

    def _after_loss(self, machine: Machine) -> str:
        if machine.rank:
            return "The others continue without it."
        return (
            f"The others wait until a launcher is started there again, for up to {self._timeout_seconds:g} s "
            "(--rdzv_conf timeout)."
        )

    def may_leave(self, number: int) -> bool:
        # Ctrl-C at the main address ends the run. After SIGTERM that machine may be replaced.
        return bool(number) and not (isinstance(self.board, Hub) and number == signal.SIGINT)

    def withdraw(self, cause: Cause) -> None:
        board = self.board
        if board is not None and not board.me.state.is_final:
            interrupted = cause.kind == INTERRUPTED and self.may_leave(cause.code - 128)
            ends = isinstance(board, Hub) and not interrupted
            board.post(state=State.FAILED if ends else State.LEFT, cause=cause)
        self.leave()

    # -- while the ranks run -----------------------------------------------------------------------------------------

    def is_awaited(self) -> bool:
        board = self.board
        if board is None:
            return False
        machines = board.machines()
        if isinstance(board, Hub):
            return any(map(self._has_stopped, self._others(machines))) or self._calls_others(board)
        main = machines.get(0)
        if main is None:
            return False
        return self._has_moved(main) or main.state in (State.WAITING, State.LEFT, State.ENDED)

    def _has_moved(self, main: Machine) -> bool:
        """Return True if the launcher at the main address is in another start than the ranks of this machine."""
        return (main.round, main.id) != (self.round, self._main_id)

    def _others(self, machines: Mapping[int, Machine]) -> list[Machine | None]:
        """Return the other machines of this start.

        None for one that is not on the board any more, or was started again.
        """
        found = []
        for number, launcher in list(self._members.items()):
            machine = machines.get(int(number))
            if self.board is None or int(number) != self.board.me.rank:
                found.append(machine if machine is not None and machine.id == launcher else None)
        return found

    def _has_stopped(self, machine: Machine | None) -> bool:
        if machine is None or machine.state is not State.WAITING:
            return machine is None or machine.state not in (State.RUNNING, State.SUCCEEDED)
        return machine.round >= self.round  # otherwise it does not know of this start yet

    def may_save(self) -> bool:
        """Return True if all ranks of this start run, or end because they have saved."""
        board = self.board
        if board is None:
            return False
        for machine in self._others(board.machines()):
            if machine is None:
                return False
            if machine.state.is_final:
                continue
            failed = machine.cause is not None and machine.cause.round == self.round
            if failed or board.silent(machine.rank) >= QUIET_SECONDS:
                return False
        return True

    def _calls_others(self, hub: Hub) -> bool:
        """Return True if the machines must meet again, because another one for which there is room has arrived."""
        # One of this start that does not know of it yet waits too.
        waiting = [one for one in self._waiting(hub) if one.id not in self._members.values()]
        ending = any(one is not None and one.state is State.SUCCEEDED for one in self._others(hub.machines()))
        if not waiting or ending or len(self._members) >= self._machines or self._may_come(waiting):
            return False
        self._calls = True
        return True

    # -- meeting -----------------------------------------------------------------------------------------------------

    def meet(self) -> Meeting:
        """Wait until the launcher at the main address begins a start in which this machine takes part.

        Raises:
            RendezvousTimeoutError: too few machines arrived in time.
            RendezvousClosedError: the run has ended, or no further restart is allowed.
            RendezvousStateError: another program listens at the main address.
            ConfigurationError: the machines disagree, or this one cannot listen at the main address.
        """
        if self.board is None:
            self.board = self._join_range()
        board = self.board
        board.post(members={}, port=0, state=State.WAITING, restarts=self._restarts)
        waiting = self._begin_waiting()
        while True:
            version = board.version
            self._check(board)
            meeting = self._begin(board) if isinstance(board, Hub) else self._follow(board)
            if meeting is not None:
                return meeting
            main = board.machines().get(0)
            if board.me.rank and main is not None and main.state is State.RUNNING and board.silent(0) < QUIET_SECONDS:
                if self._has_moved(main):
                    self._say_once(self._standing_by(main))
                waiting = self._begin_waiting()
            elif waiting.is_over:
                raise RendezvousTimeoutError(
                    f"not within {self._timeout_seconds:g} s: waited for {self._missing(board)}"
                )
            waiting.note(lambda: self._missing(board))
            board.wait_for_change(version, _SLICE_SECONDS)

    def _begin_waiting(self) -> Waiting:
        return Waiting(self._timeout_seconds, say)

    def _say_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            say(text)

    def _standing_by(self, main: Machine) -> str:
        most = int(self._machines)
        if self.board is not None and self.board.me.id in main.held:
            return main.held[self.board.me.id]
        if len(main.members) < most:
            return "this machine has arrived while the run trains; it takes part once the run has saved its state"
        return (
            f"this machine stands by: {most} machines train, the most of --num_machines {self._machines}. It "
            "takes the place of one that leaves."
        )

    def _check(self, board: Board) -> None:
        """Raise an error if there is nothing to wait for."""
        board.raise_if_refused()
        if not isinstance(board, Member):
            ended = [one for one in self._others(board.machines()) if one is not None and one.state is State.SUCCEEDED]
            if ended:
                names = ", ".join(one.named() for one in ended)
                raise RendezvousClosedError(f"the processes of {names} have ended and are not restarted")
            return
        if reason := board.hopeless():
            raise RendezvousStateError(reason)
        main = board.machines().get(0)
        if main is None or not main.state.is_final or main.state is State.LEFT:
            return
        if main.state is State.SUCCEEDED and self._has_moved(main):
            raise RunEnded("the run has ended, without this machine")
        reason = f": {main.cause.text}" if main.cause is not None else ""
        raise RendezvousClosedError(f"the run has ended{reason}")

    def _waiting(self, hub: Hub) -> list[Machine]:
        """Return the machines that wait for a start, the earliest first; those of the last start before others."""
        found = [
            machine
            for machine in hub.others()
            if machine.waits and not machine.state.is_final and hub.silent(machine.rank) < QUIET_SECONDS
        ]
        reasons = {one.id: self._short_lives.reason(one.named()) for one in found if one.id not in self._names}
        held = {key: reason for key, reason in reasons.items() if reason}
        if held.keys() != hub.me.held.keys():
            hub.post(held=held)
        found = [machine for machine in found if machine.id not in held]
        for machine in found:
            self._arrivals.setdefault(machine.id, time.monotonic())
        order = list(self._members.values())
        return sorted(
            found,
            key=lambda one: (order.index(one.id) if one.id in order else len(order), self._arrivals[one.id]),
        )

    def _may_come(self, machines: Iterable[Machine]) -> bool:
        """Return True if further machines may arrive: the latest of these, which are new, came only just now."""
        former = self._members.values()
        times = [self._arrivals[one.id] for one in machines if one.id not in former]
        return bool(times) and time.monotonic() - max(times) < self._last_call_seconds

    def _is_expected(self, hub: Hub, machine: Machine) -> bool:
        """Return True if a machine will wait soon: its ranks are about to end, or it is about to be declared lost."""
        is_new = machine.waits and machine.id not in self._members.values()
        is_lost = any(one.id == machine.id for one, _ in hub.lost())
        return not (machine.state.is_final or is_new or is_lost)

    def _begin(self, hub: Hub) -> Meeting | None:
        """On the machine of the main address: begin a start if all that take part wait for it."""
        waiting = self._waiting(hub)
        ready = {one.id for one in waiting}
        if any(one.id not in ready and self._is_expected(hub, one) for one in hub.others()):
            return None
        self._note_ends(hub, ready)
        machines = [hub.me, *waiting][: self._machines]
        if len(machines) < self._machines.minimum:
            return None
        if len(machines) < self._machines and self._may_come(machines):
            return None
        self._count(one.id for one in machines)
        members = {str(one.rank): one.id for one in machines}
        number = 1 + max(one.round for one in hub.machines().values())
        self._restarts = max([self._restarts, *(one.restarts for one in machines)])
        port = self._serve_ranks()
        hub.post(round=number, members=members, port=port, state=State.RUNNING, restarts=self._restarts)
        meeting = self._meeting(hub, hub.me)
        for machine in machines[1:]:
            self._short_lives.begin(machine.id)
        lost = {one.rank for one, _ in hub.lost()}
        for machine in hub.others():
            if machine.rank in lost or (machine.state.is_final and machine.state is not State.SUCCEEDED):
                hub.forget(machine.rank)
        return meeting

    def _note_ends(self, hub: Hub, present: set[str]) -> None:
        """Note which machines of the last start are gone."""
        machines = hub.machines()
        for number, launcher in self._members.items():
            machine = machines.get(int(number))
            if launcher not in present and launcher != hub.me.id:
                left = machine is not None and machine.id == launcher and machine.state is State.LEFT
                if reason := self._short_lives.end(launcher, self._names[launcher], left=left):
                    say(reason)

    def _count(self, present: Iterable[str]) -> None:
        """Count a start as a restart, if no machine has joined or left since the last one.

        Raises:
            RendezvousClosedError: there were enough of them.
        """
        joined, self._calls = self._calls, False
        if self.round < 0 or joined or set(self._members.values()) - set(present):
            return
        max_restarts = self._job.rendezvous.max_restarts
        if self._restarts >= max_restarts:
            raise RendezvousClosedError(
                f"this is a restart after a failure, which --max_restarts {max_restarts} does not allow"
            )
        self._restarts += 1

    def _follow(self, board: Board) -> Meeting | None:
        """On other machines: the start that this machine takes part in, once it has begun."""
        machines, me = board.machines(), board.me
        main = machines.get(0)
        if main is None or main.state is not State.RUNNING or main.members.get(str(me.rank)) != me.id:
            return None
        if (main.round <= self.round and main.id == self._main_id) or not {*map(int, main.members)} <= {*machines}:
            return None
        self._restarts = main.restarts
        board.post(round=main.round, members=main.members, state=State.RUNNING, restarts=main.restarts)
        return self._meeting(board, main)

    def _meeting(self, board: Board, main: Machine) -> Meeting:
        machines = board.machines()
        members = [machines[int(number)] for number in main.members]
        sizes = [one.local_processes for one in members]
        news = self._news(machines, members, main.restarts)
        counts, self._told_restarts = main.restarts > self._told_restarts, main.restarts
        self._members, self.round, self._main_id, self._told = dict(main.members), main.round, main.id, ""
        self._names = {one.id: one.named() for one in members}
        rank = list(main.members).index(str(board.me.rank))
        return Meeting(rank, self._host, main.port, main.restarts, sizes, news=news, is_failure=counts)

    def _news(self, machines: Mapping[int, Machine], members: list[Machine], restarts: int) -> str:
        """Return what has changed, and how many machines and processes start; say it if it is the first start here."""
        processes = counted(sum(one.local_processes for one in members), "process")
        who = f"{processes} on {counted(len(members), 'machine')} ({', '.join(_hosts(members))})"
        if self.round < 0:
            self._say_once(f"starting {who}")
            return ""
        present = {one.id for one in members}
        left = {int(number): key for number, key in self._members.items() if key not in present}
        again = [one.named() for one in members if one.rank in left]
        changes = [f"{name} was started again" for name in again]
        gone = [(self._names[key], machines.get(number)) for number, key in left.items()]
        changes += [f"{name} {_departure(machine)}" for name, machine in gone if name not in again]
        new = [one.named() for one in members if one.id not in self._names]
        changes += [f"{name} has joined" for name in new if name not in again]
        if not changes and restarts > self._told_restarts:
            changes = [f"a process failed (restart {restarts} of {self._job.rendezvous.max_restarts})"]
        return f"{'; '.join(changes) or 'the machines have met again'}: starting {who}"

    def _missing(self, board: Board) -> str:
        """Return who is here and who is not, for a message."""
        place = self.place
        main = board.machines().get(0)
        if isinstance(board, Member) and not board.met:
            return f"the launcher of the machine at {place}: {board.problem}"
        if main is None or main.state is State.LEFT:
            return f"a launcher at {place}, whose machine has left"
        if board.silent(0) >= QUIET_SECONDS:
            return f"the launcher of the machine at {place}, no heartbeat for {board.silent(0):.0f} s"
        here = [one for one in board.machines().values() if one.waits and board.silent(one.rank) < QUIET_SECONDS]
        late = [one for one in board.others() if not one.waits and not one.state.is_final]
        if late:
            return f"the processes of {', '.join(one.named() for one in late)} to end"
        held = "".join(f"; {reason}" for reason in (() if main is None else main.held.values()))
        return f"at least {self._machines.minimum} machines to meet at {place}; here: {', '.join(_hosts(here))}{held}"


def _hosts(machines: Iterable[Machine]) -> list[str]:
    return [machine.host for machine in machines]


def _departure(machine: Machine | None) -> str:
    """Return how a machine that does not take part any more has gone, as far as it is known."""
    if machine is None or machine.state is not State.LEFT:
        return "is gone"
    reason = f" ({machine.cause.text.partition(' on ')[0]})" if machine.cause is not None else ""
    return f"has left{reason}"


def check_last_call(text: str) -> float:
    """Return seconds of ``--rdzv_conf last_call_timeout``.

    Raises:
        ConfigurationError: it is not a number of seconds.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigurationError(
            f"--rdzv_conf last_call_timeout={text} must be a number of seconds of at least 0, such as 5."
        )
    return seconds
