"""Waiting for other machines, and how those of a run ended. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from accel_state.errors import ConfigurationError

from .board import QUIET_SECONDS, SHUTDOWN_SECONDS, Board, lost_text
from .records import LOST, Cause, Machine, State

DEFAULT_TIMEOUT_SECONDS = 900.0
FIRST_NOTE_SECONDS = 5.0
"""So long after its start a launcher says what it waits for."""
LEAST_SECONDS = 2.0
"""But not before it has waited this long: machines do not start at the same moment."""
NOTE_SECONDS = 30.0
_LOST_CODE = 1


def rendezvous_settings(text: str) -> Mapping[str, str]:
    """``timeout=600,join_timeout=300`` of ``--rdzv_conf`` as a mapping, with the default timeout."""
    settings = {"timeout": f"{DEFAULT_TIMEOUT_SECONDS:g}"}
    for entry in filter(None, text.split(",")):
        key, _, value = entry.partition("=")
        settings[key.strip()] = value.strip()
    return settings


def timeout_seconds(rdzv_conf: str) -> float:
    """Return how long to wait for other machines.

    Raises:
        ConfigurationError: that is not a number.
    """
    settings = rendezvous_settings(rdzv_conf)
    name = "join_timeout" if "join_timeout" in settings else "timeout"  # torch's two names for it
    try:
        return float(settings[name])
    except ValueError:
        raise ConfigurationError(
            f"--rdzv_conf {name}={settings[name]} must be a number of seconds, such as {name}=600."
        ) from None


class Waiting:
    """A wait that begins now.

    Args:
        limit: seconds after which it is over; 0 for never.
        say: prints a line.
    """

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self._begin, self._due = time.monotonic(), max(LEAST_SECONDS, FIRST_NOTE_SECONDS - _age())

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._begin

    @property
    def is_over(self) -> bool:
        """True if the limit has passed."""
        return bool(self._limit) and self.seconds > self._limit

    def note(self, what: Callable[[], str]) -> None:
        """Report what the launcher waits for, if a line is due."""
        seconds = self.seconds
        if seconds > self._due:
            self._due = seconds + NOTE_SECONDS
            limit = f" of {self._limit:g} s" if self._limit else " s"
            self._say(f"waiting for {what()} ({seconds:.0f}{' s' if self._limit else ''}{limit})")


def _age() -> float:
    """Return seconds since this process was started: importing torch may have taken most of them."""
    import psutil  # needed with several machines only

    return time.time() - psutil.Process().create_time()


class Peers:
    """The other machines of a run that has started.

    Args:
        board: the board of the run.
        round: the start that the ranks belong to.
        count: machines of the run.
        members: their numbers, if others are on the board too: with a range of machines, those that stand by.
    """

    def __init__(self, board: Board, round: int, count: int, members: Collection[int] = ()) -> None:
        self._board, self._round, self._count, self._members = board, round, count, members

    def post(self, state: State, cause: Cause | None = None) -> None:
        """Tell how the ranks of this machine ended."""
        self._board.post(state=state, cause=cause)

    def failure(self) -> Cause | None:
        """Why this machine must end or restart its ranks: another machine failed, or is declared lost; else None."""
        failed = [one for one in self._others() if one.state is State.FAILED]
        return self.first() if failed else self.loss()

    def _others(self) -> list[Machine]:
        return [one for one in self._board.others() if self._takes_part(one)]

    def _takes_part(self, machine: Machine) -> bool:
        return not self._members or machine.rank in self._members

    def loss(self) -> Cause | None:
        """Return the loss of another machine that is declared lost, or None."""
        lost = [(one, silent) for one, silent in self._board.lost() if self._takes_part(one)]
        return _loss(*lost[0], self._round) if lost else None

    def any_ended(self) -> bool:
        """Return True if another machine has ended, with or without a failure."""
        return any(one.state.is_final and one.state is not State.LEFT for one in self._others())

    def first(self) -> Cause | None:
        """Return what happened first, as far as it is known; None if nothing failed."""
        told = [one for one in self._board.machines().values() if one.cause is not None]
        causes = [
            one.cause
            for one in told
            if one.cause is not None and (one.cause.round == self._round or one.state is State.FAILED)
        ]
        causes += [_loss(one, self._board.silent(one.rank), self._round) for one in self._unheard()]
        return min(causes, key=lambda cause: cause.kind, default=None)

    def _unheard(self) -> list[Machine]:
        """Machines that do not answer now, and did not say how they ended."""
        return [
            one
            for one in self._others()
            if self._board.silent(one.rank) > QUIET_SECONDS and not one.state.is_final and one.round == self._round
        ]

    def settle(self) -> Cause | None:
        """Wait until every machine that answers has told how it ended, for a few seconds at most.

        Returns:
            What happened first.
        """
        self._board.wait(lambda: self._all_final(self._unheard()), SHUTDOWN_SECONDS)
        return self.first()

    def _all_final(self, except_for: Collection[Machine] = ()) -> bool:
        others = self._others()
        # A member that is not on the board any more was declared lost, or has left.
        complete = bool(self._members) or len(others) == self._count - 1
        return complete and all(one.state.is_final for one in others if one not in except_for)

    def wait_for_end(self) -> Cause | None:
        """Wait until the ranks of all machines have ended, or one machine has failed or is declared lost.

        Returns:
            Why it failed, or None.
        """
        found: list[Cause | None] = [None]

        def has_ended() -> bool:
            found[0] = self.failure()
            return found[0] is not None or self._all_final()

        while not self._board.wait(has_ended, SHUTDOWN_SECONDS):
            pass
        return found[0]


def _loss(machine: Machine, silent: float, round: int) -> Cause:
    return Cause(LOST, lost_text(machine, silent), _LOST_CODE, round)
