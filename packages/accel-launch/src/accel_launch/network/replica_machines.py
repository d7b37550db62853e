"""The machines of a run of fault-tolerant replicas, as one launcher sees the others. Torch-free.

The launchers see each other's records on a board, as those that supervise ranks do. But a machine may come, go and
return at any time: only the one of rank 0, which has the lighthouse, is needed by all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from accel_state.errors import ConfigurationError

from .board import QUIET_SECONDS, SHUTDOWN_SECONDS, Board, Member, join, lost_text
from .peers import Waiting
from .records import LOST, Cause, Machine, State

_LOOK_SECONDS = 0.5
_SHARE_SECONDS = 1.0


class ReplicaMachines:
    """The board of a run of replicas.

    Args:
        main: host and port of machine rank 0.
        rank: of this machine.
        count: machines of the run.
        facts: what the machines must agree on.
        give_up_seconds: when a silent machine is declared lost; 0 for never.
        timeout_seconds: how long to wait for machine rank 0, at the start and after it is declared lost.
        is_short: whether replicas of machines with these ranks are too few for a step.
        say: prints a line.

    Raises:
        ConfigurationError: this machine has rank 0 and cannot listen at the main address, or is not reached there.
    """

    def __init__(
        self,
        main: tuple[str, int],
        rank: int,
        count: int,
        *,
        facts: Mapping[str, str],
        give_up_seconds: float,
        timeout_seconds: float,
        is_short: Callable[[list[int]], bool],
        say: Callable[[str], None],
    ) -> None:
        self._main, self._rank, self._count, self._say = main, rank, count, say
        self._timeout_seconds, self._is_short = timeout_seconds, is_short
        self._board: Board = join(*main, rank, count, local_processes=0, facts=facts, give_up_seconds=give_up_seconds)
        self._board.after_loss = self._after_loss
        self._waiting = Waiting(0, say)
        self._wait_for_main: Waiting | None = None
        self._ended: set[str] = set()
        self._shared_at = 0.0

    def _after_loss(self, machine: Machine) -> str:
        if machine.rank:
            return "The others continue without it."
        return f"The replicas of this machine wait for it, for up to {self._timeout_seconds:g} s (--rdzv_conf timeout)."

    # -- the lighthouse ----------------------------------------------------------------------------------------------

    def announce(self, port: int) -> None:
        """On machine rank 0: tell the others where the lighthouse is reached."""
        self._board.post(round=0, members={str(self._rank): self._board.me.id}, port=port, state=State.RUNNING)

    def wait_for_lighthouse(self) -> tuple[str, int]:
        """On other machines: where the lighthouse is reached, once it is known.

        Raises:
            ConfigurationError: machine rank 0 did not answer in time, or the machines disagree.
        """
        waiting = Waiting(self._timeout_seconds, self._say)
        while not (port := self.lighthouse_port()):
            version = self._board.version
            self._check()
            if waiting.is_over:
                host, number = self._main
                raise ConfigurationError(
                    f"no lighthouse listens at {host}:{number}: {self._problem()}. Start the launcher of machine rank "
                    "0, and check that this machine can reach that port."
                )
            waiting.note(lambda: f"the machine of rank 0 at {self._main[0]}:{self._main[1]}: {self._problem()}")
            self._board.wait_for_change(version, _LOOK_SECONDS)
        self.announce(0)
        return self._main[0], port

    def lighthouse_port(self) -> int:
        """Return the port of the lighthouse's tunnel on machine rank 0; 0 before it is known."""
        main = self._board.machines().get(0)
        return 0 if main is None else main.port

    def _problem(self) -> str:
        return self._board.problem if isinstance(self._board, Member) else ""

    def _check(self) -> None:
        self._board.raise_if_refused()
        if isinstance(self._board, Member) and (reason := self._board.hopeless()):
            raise ConfigurationError(f"{reason}.")

    # -- during the run ----------------------------------------------------------------------------------------------

    def look(self) -> Cause | None:
        """Say what has become of other machines; why this one must end, or None.

        Raises:
            ConfigurationError: the machines disagree, or another launcher has taken over the rank of this machine.
        """
        self._check()
        machines = self._board.machines()
        for machine in machines.values():
            if machine.rank != self._rank and machine.state is State.FAILED and machine.id not in self._ended:
                self._ended.add(machine.id)
                reason = f": {machine.cause.text}" if machine.cause is not None else ""
                self._say(f"{machine.named()} has ended{reason}")
        main = machines.get(0)
        if self._rank and main is not None and main.state is State.FAILED:
            return main.cause or Cause(LOST, "the lighthouse has ended", 1)
        here = [rank for rank in machines if self._is_here(machines[rank])]
        missing = sorted(set(range(self._count)) - set(here))
        if not missing or not self._is_short(here) or (self._rank and 0 in missing):
            self._waiting = Waiting(0, self._say)
        self._waiting.note(lambda: ", ".join(_named(machines, one) for one in missing))
        return self._lost_main()

    def _is_here(self, machine: Machine) -> bool:
        return not machine.state.is_final and self._board.silent(machine.rank) < QUIET_SECONDS

    def _lost_main(self) -> Cause | None:
        """Return the loss of machine rank 0, once the wait for it was long enough; else None."""
        main = next(((machine, silent) for machine, silent in self._board.lost() if machine.rank == 0), None)
        if main is None:
            self._wait_for_main = None
            return None
        text = lost_text(*main)
        if self._wait_for_main is None:
            self._wait_for_main = Waiting(self._timeout_seconds, self._say)
        self._wait_for_main.note(lambda: f"{main[0].named()}, no heartbeat for {main[1]:.0f} s")
        return Cause(LOST, text, 1) if self._wait_for_main.is_over else None

    def share(self, reports: Mapping[str, str]) -> None:
        """Tell the others how far the replicas of this machine are, about once a second."""
        now = time.monotonic()
        if now >= self._shared_at + _SHARE_SECONDS and reports != self._board.me.reports:
            self._shared_at = now
            self._board.post(reports=dict(reports))

    def elsewhere(self) -> dict[str, str]:
        """Return how far the replicas of the other machines are that are here, by name."""
        here = filter(self._is_here, self._board.others())
        return {name: text for one in here for name, text in one.reports.items()}

    def has_finished(self) -> bool:
        """Return True if the training has ended on another machine: it does on all at the same step."""
        return any(
            one.state is State.SUCCEEDED or any(text.startswith("finished") for text in one.reports.values())
            for one in self._board.others()
        )

    def post(self, state: State, cause: Cause | None = None) -> None:
        """Tell the others how the run has ended on this machine."""
        self._board.post(state=state, cause=cause)

    def leave(self) -> None:
        """End the connections, once the others have been told."""
        self._board.close(SHUTDOWN_SECONDS)


def _named(machines: Mapping[int, Machine], rank: int) -> str:
    return machines[rank].named() if rank in machines else f"machine rank {rank}"
