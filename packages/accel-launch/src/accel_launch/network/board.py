"""The board: every launcher posts a record of its machine, and sees those of all others.

The launcher of machine rank 0 listens at the main address (:class:`~.hub.Hub`), the others connect to it
(:class:`~.member.Member`). A thread on each side sends a beat every second. What the main thread asks is answered from
memory, so that no lost network holds it up. Durations are counted in this thread's own turns: no clocks are compared,
and time during which this process was suspended does not count.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from accel_state.errors import ConfigurationError

from .fields import checked
from .records import Machine

BEAT_SECONDS = 1.0
REPORT_SECONDS = 10.0
"""A machine that is silent for so long is reported."""
FAREWELL_SECONDS = 8.0
"""How long a machine that ends waits for the others to notice."""
QUIET_SECONDS = 3.0
"""A machine that is silent for so long is not counted on for a start, or for an answer."""
HANDSHAKE_SECONDS = 5.0
MAX_LINE = 4 << 20
"""Bytes of a message; facts of a machine are a few thousand."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Refusal:
    """Why no machine may start."""

    text: str
    code: int = 2


@dataclass
class _Report:
    """A machine of whose silence was reported."""

    id: str
    silent: float
    given_up: bool = False


class Board(ABC):
    """What the launchers know of each other, as this machine sees it.

    Args:
        me: the record of this machine.
        give_up_seconds: when a machine that is silent is given up; 0 for never.
        say: prints a line.
    """

    def __init__(self, me: Machine, give_up_seconds: float, say: Say) -> None:
        self._rank, self._say = me.rank, say
        self.give_up_seconds: float = give_up_seconds
        self._changed = threading.Condition(threading.RLock())
        self._machines = {me.rank: me}
        self._silent: dict[int, float] = {}
        self._reported: dict[int, _Report] = {}
        self.version: int = 0
        """Counts changes of what :meth:`machines` returns, and of refusals."""
        self.after_loss: Callable[[Machine], str] = lambda _: ""
        """What follows when a machine is given up, to be said at that moment; empty if the launcher says so itself."""
        self.refusal: Refusal | None = None
        """Set when the machines must not start."""
        self.own_address = ""
        """The address of this machine from which it reaches the others; empty before they have met."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="accel-launch-board", daemon=True)

    # -- for the main thread -----------------------------------------------------------------------------------------

    @property
    def me(self) -> Machine:
        """The record of this machine."""
        with self._changed:
            return self._machines[self._rank]

    def machines(self) -> dict[int, Machine]:
        """The latest record of every machine that was ever here, by machine rank."""
        with self._changed:
            return dict(self._machines)

    def others(self) -> list[Machine]:
        """The records of the other machines."""
        return [machine for rank, machine in self.machines().items() if rank != self._rank]

    def post(self, **changes: Any) -> None:
        """Change the record of this machine, and send it."""
        with self._changed:
            self._machines[self._rank] = replace(self._machines[self._rank], **changes)
            self.version += 1
            self._own_record_changed()
        self._wake()

    def silent(self, rank: int) -> float:
        """Seconds since a machine was heard of."""
        with self._changed:
            return self._silent.get(rank, 0.0)

    def lost(self) -> list[tuple[Machine, float]]:
        """Machines to give up, with the seconds of their silence."""
        with self._changed:
            if not self.give_up_seconds:
                return []
            return [
                (machine, silent)
                for rank, machine in sorted(self._machines.items())
                if (silent := self._silent.get(rank, 0.0)) >= self._limit(rank) and not machine.state.is_final
            ]

    def _limit(self, rank: int) -> float:
        """After how many seconds of silence a machine is given up."""
        return self.give_up_seconds

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, which is asked again after each change; return whether it holds."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def wait_for_change(self, version: int, seconds: float) -> None:
        """Wait until :attr:`version` is another one."""
        self.wait(lambda: self.version != version, seconds)

    def raise_if_refused(self) -> None:
        """Raise ConfigurationError, after printing the table that belongs to it, if the machines must not start."""
        if self.refusal is not None:
            reason, _, table = self.refusal.text.partition("\n")
            if table:
                print(table, file=sys.stderr, flush=True)
            raise ConfigurationError(reason)

    def held(self) -> AbstractContextManager[Any]:
        """A block during which the board's thread holds no lock, for forks of this process."""
        return self._changed

    def close(self, seconds: float = FAREWELL_SECONDS) -> None:
        """Send what is left to send, for at most so many seconds, and end the connections."""
        self.wait(self._is_delivered, seconds)
        self._closing = True
        self._wake()
        self._thread.join(BEAT_SECONDS * 2)

    # -- for the thread ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"x")

    def _run(self) -> None:
        before = time.monotonic()
        due = before
        while not self._closing:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                if key.fileobj is self._wake_reader:
                    with suppress(BlockingIOError):
                        self._wake_reader.recv(4096)
                else:
                    self._readable(key.data)
            now = time.monotonic()
            beat = now >= due
            if beat:
                due = now + BEAT_SECONDS
            with self._changed:
                # A longer turn is one in which this process did not run.
                self._count(min(now - before, 2 * BEAT_SECONDS))
                self._report()
                self._flush(beat)
                self._changed.notify_all()
            before = now
        self._end()
        self._selector.close()
        for end in (self._wake_reader, self._wake_writer):
            end.close()

    def _report(self) -> None:
        """Say which machines have become silent, and which are back."""
        for rank, machine in self._machines.items():
            silent = 0.0 if machine.state.is_final else self._silent.get(rank, 0.0)
            report = self._reported.get(rank)
            if report is None:
                if silent >= REPORT_SECONDS:
                    self._reported[rank] = _Report(machine.id, silent)
                    self._say(f"{machine.named()} has not been heard of for {REPORT_SECONDS:.0f} s{self._outlook()}")
            elif silent < QUIET_SECONDS:
                del self._reported[rank]
                if not machine.state.is_final:
                    again = "is back" if report.id == machine.id else "was started again"
                    self._say(f"{machine.named()} {again} after {report.silent:.0f} s")
            else:
                report.silent = silent
                if self.give_up_seconds and silent >= self.give_up_seconds and not report.given_up:
                    report.given_up = True
                    if then := self.after_loss(machine):
                        self._say(f"{lost_text(machine, silent)} {then}")

    def _outlook(self) -> str:
        if not self.give_up_seconds:
            return "; it is waited for without limit (--machine_timeout 0)"
        return f"; it is given up after {self.give_up_seconds:g} s (--machine_timeout)"

    @abstractmethod
    def _own_record_changed(self) -> None:
        """Note that the record of this machine has to be sent."""

    @abstractmethod
    def _is_delivered(self) -> bool:
        """Whether everything has been sent that others need."""

    @abstractmethod
    def _readable(self, source: Any) -> None:
        """Read from a socket."""

    @abstractmethod
    def _count(self, seconds: float) -> None:
        """Count the silence of the machines."""

    @abstractmethod
    def _flush(self, beat: bool) -> None:
        """Send what has changed, and a beat if one is due."""

    @abstractmethod
    def _end(self) -> None:
        """Close all connections."""


class Lines:
    """A connection on which lines of JSON are sent and received without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._received = b""
        self._unsent = b""

    def send(self, data: bytes) -> None:
        """Send what fits, and keep the rest for the next call.

        Raises:
            OSError: the connection has ended, or the other side has not read for too long.
        """
        self._unsent += data
        if len(self._unsent) > 4 * MAX_LINE:
            raise ConnectionError("the peer does not read")
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[bytes]:
        """The lines that have arrived.

        Raises:
            OSError: the connection has ended.
        """
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the connection was closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > MAX_LINE:
            raise ConnectionError("a line is too long")
        return lines

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def lost_text(machine: Machine, silent: float) -> str:
    """The sentence about a machine that is given up."""
    return f"{machine.named()} is lost: it has not been heard of for {silent:.0f} s."


def silences(data: Any) -> Mapping[int, float]:
    """Seconds by machine rank, from JSON.

    Raises:
        ValueError: it is something else.
    """
    checked(data)
    return {int(rank): float(seconds) for rank, seconds in data.items()}
