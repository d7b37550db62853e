"""The board: every launcher posts a record of its machine, and sees those of all others.

The launcher of machine rank 0 listens at the main address (:class:`Hub`), the others connect to it (:class:`Member`);
:func:`join` makes the one or the other. A thread on each side sends a beat every second. What the main thread asks is
answered from memory, so that no lost network holds it up. Durations are counted in this thread's own turns: no clocks
are compared, and time during which this process was suspended does not count.
"""

from __future__ import annotations

import math
import selectors
import socket
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from accel_state.env import read_str
from accel_state.errors import ConfigurationError
from accel_state.ports import is_local, listen, listening_host
from accel_state.run_token import VARIABLE as TOKEN_VARIABLE
from accel_state.run_token import TokenError, accept, connect, read_token

from .agreement import compare
from .interfaces import addresses_here
from .records import ANY_RANK, RAISED, Cause, Lines, Machine, State, line, read_object, silences

BEAT_SECONDS = 1.0
REPORT_SECONDS = 10.0
"""A machine that is silent this long is reported."""
SHUTDOWN_SECONDS = 8.0
"""How long a machine that ends waits for the others to notice."""
QUIET_SECONDS = 3.0
"""A machine that is silent this long is not expected at a start, or for an answer."""
HANDSHAKE_SECONDS = 5.0
# So many connections may be about to prove that they have the token; further ones are closed at once.
_HANDSHAKES = 256
_NAMED_UNKNOWN = 8
# A connection on which nothing arrives this long, here or there, is replaced: after a lost packet TCP waits longer
# and longer, in one direction or in both.
_RENEW_SECONDS = 4.0
_RETRY_SECONDS = 0.3
# What listens there this long without being the launcher of this run is something else.
_UNKNOWN_SECONDS = 8.0
# Proves that a launcher of accel listens, but not whose it is: a run has a secret only if the user has set one.
_NO_TOKEN = b"accel launch without a token"


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
        give_up_seconds: when a machine that is silent is declared lost; 0 for never.
    """

    def __init__(self, me: Machine, give_up_seconds: float) -> None:
        self._rank = me.rank
        self.give_up_seconds: float = give_up_seconds
        self._changed = threading.Condition(threading.RLock())
        self._machines = {me.rank: me}
        self._silent: dict[int, float] = {}
        self._reported: dict[int, _Report] = {}
        self.version: int = 0
        """Counts changes of what :meth:`machines` returns, and of refusals."""
        self.after_loss: Callable[[Machine], str] = lambda _: ""
        """Message to print when a machine is declared lost; empty if the launcher prints its own."""
        self.refusal: Cause | None = None
        """Why no machine may start; None if they may."""
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
        """Return the latest record of every machine that was ever here, by machine rank."""
        with self._changed:
            return dict(self._machines)

    def others(self) -> list[Machine]:
        """Return the records of the other machines."""
        return [machine for rank, machine in self.machines().items() if rank != self._rank]

    def post(self, **changes: Any) -> None:
        """Change the record of this machine, and send it."""
        with self._changed:
            self._machines[self._rank] = replace(self._machines[self._rank], **changes)
            self.version += 1
            self._own_record_changed()
        self._wake()

    def silent(self, rank: int) -> float:
        """Return the seconds since a machine's last heartbeat."""
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
        """After how many seconds of silence a machine is declared lost."""
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
        """Return a context in which the board's thread holds no lock, for forks of this process."""
        return self._changed

    def close(self, seconds: float = SHUTDOWN_SECONDS) -> None:
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
                    limit = f"; it is declared lost after {self.give_up_seconds:g} s (--machine_timeout)"
                    then = limit if self.give_up_seconds else "; waiting indefinitely (--machine_timeout 0)"
                    say(f"{machine.named()} has sent no heartbeat for {REPORT_SECONDS:.0f} s{then}")
            elif silent < QUIET_SECONDS:
                del self._reported[rank]
                if not machine.state.is_final:
                    again = "is back" if report.id == machine.id else "was started again"
                    say(f"{machine.named()} {again} after {report.silent:.0f} s")
            else:
                report.silent = silent
                if self.give_up_seconds and silent >= self.give_up_seconds and not report.given_up:
                    report.given_up = True
                    if then := self.after_loss(machine):
                        say(f"{lost_text(machine, silent)} {then}")

    @abstractmethod
    def _own_record_changed(self) -> None:
        """Note that the record of this machine has to be sent."""

    @abstractmethod
    def _is_delivered(self) -> bool:
        """Return True if everything has been sent that others need."""

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


def lost_text(machine: Machine, silent: float) -> str:
    """Return the sentence about a machine that is declared lost."""
    return f"{machine.named()} is lost: it has sent no heartbeat for {silent:.0f} s."


@dataclass(eq=False)
class _Peer:
    """A connected launcher."""

    lines: Lines
    address: str
    rank: int = -1  # of its machine; -1 before its first record
    id: str = ""
    sent: dict[int, int] = field(default_factory=dict)  # versions of records
    knows_refusal: bool = False


class Hub(Board):
    """The board of machine rank 0.

    Args:
        me: the record of this machine.
        host: the address to listen at; empty for all.
        port: 0 for any free one.
        token: what a launcher must have to take part.
        count: machines of the run.
        give_up_seconds: when a silent machine is declared lost; 0 for never.

    Raises:
        OSError: it cannot listen there.
    """

    version: int

    def __init__(self, me: Machine, host: str, port: int, token: bytes, count: int, give_up_seconds: float) -> None:
        super().__init__(me, give_up_seconds)
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self.port: int = int(self._listener.getsockname()[1])
        self._token, self._expected = token, count
        self._handshakes = threading.BoundedSemaphore(_HANDSHAKES)
        self._versions = {me.rank: 1}
        self._peers: list[_Peer] = []
        self._closed: set[int] = set()  # ranks of machines whose launcher has closed its connection
        self.closed_seconds: float = math.inf
        """When a machine is declared lost whose launcher has closed its connection, and has not connected again."""
        self._left = {me.id}
        """Ids of launchers that have said that they leave."""
        self._unknown_peers: set[str] = set()
        self._warned: set[str] = set()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def _own_record_changed(self) -> None:
        self._touch(self._rank)

    def _touch(self, rank: int) -> None:
        self._versions[rank] = self._versions.get(rank, 0) + 1
        self.version += 1

    def refuse(self, text: str, code: int = 2) -> None:
        """End all machines that have not started, with a reason."""
        with self._changed:
            self._refuse(text, code)
        self._wake()

    def _refuse(self, text: str, code: int = 2) -> None:
        if self.refusal is None:
            self.refusal: Cause = Cause(RAISED, text, code)
            self.version += 1

    def forget(self, rank: int) -> None:
        """Drop the record of a machine that is gone. If it comes back, it connects as one that was never here."""
        with self._changed:
            for peer in [one for one in self._peers if one.rank == rank]:
                self._drop(peer)
            for known in (self._machines, self._silent, self._reported, self._versions):
                known.pop(rank, None)
            self._closed.discard(rank)
            self.version += 1

    def _limit(self, rank: int) -> float:
        return min(self.give_up_seconds, self.closed_seconds if rank in self._closed else math.inf)

    def _is_delivered(self) -> bool:
        """Return True if every launcher that can be reached has left: they get a message, and then leave."""
        if self.refusal is not None and len(self._machines) < self._expected:
            return False  # the others come for the reason
        # A launcher without a connection has not left: it connects again.
        here = (one.id for rank, one in self._machines.items() if self._silent.get(rank, 0.0) < QUIET_SECONDS)
        return self._left.issuperset(here)

    # -- connections -------------------------------------------------------------------------------------------------

    def _readable(self, source: Any) -> None:
        if source is None:
            with suppress(OSError):  # the client has gone already
                connection, address = self._listener.accept()
                self._begin(connection, str(address[0]).removeprefix("::ffff:"))
            return
        try:
            for text in source.lines.receive():
                self._received(source, read_object(text))
        except (OSError, ValueError):
            self._drop(source)

    def _begin(self, connection: socket.socket, address: str) -> None:
        if not self._handshakes.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(
            target=self._shake_hands, args=(connection, address), name="accel-launch-handshake", daemon=True
        ).start()

    def _shake_hands(self, connection: socket.socket, address: str) -> None:
        try:
            accept(connection, self._token, HANDSHAKE_SECONDS)
        except TokenError:
            connection.close()
            self._note_unknown(address)
            return
        except OSError:
            connection.close()  # it only asked whether somebody listens
            return
        finally:
            self._handshakes.release()
        peer = _Peer(Lines(connection), address)
        with self._changed:
            if self._closing:
                connection.close()
                return
            if not self.own_address:
                self.own_address: str = str(connection.getsockname()[0]).removeprefix("::ffff:")
                self._machines[self._rank] = _at(self._machines[self._rank], self.own_address)
                self._touch(self._rank)
            self._peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._wake()

    def _note_unknown(self, address: str) -> None:
        with self._changed:
            if address in self._unknown_peers or len(self._unknown_peers) >= _NAMED_UNKNOWN:
                return
            self._unknown_peers.add(address)
        say(
            f"refused {address}, which does not have the token of this run: set {TOKEN_VARIABLE} to the same value "
            "on every machine, or on none"
        )

    def _drop(self, peer: _Peer) -> None:
        with self._changed:
            if peer in self._peers:
                self._peers.remove(peer)
                self._selector.unregister(peer.lines.socket)
                peer.lines.close()
                if all(other.rank != peer.rank for other in self._peers):
                    self._closed.add(peer.rank)
                self._changed.notify_all()

    # -- records -----------------------------------------------------------------------------------------------------

    def _received(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        with self._changed:
            if "left" in message:
                self._left.add(peer.id)
            if "machine" in message:
                machine = _at(Machine.read(message["machine"]), peer.address)
                if machine.rank != ANY_RANK:
                    self._take(peer, machine)
                elif rank := self._free_rank(machine):
                    peer.lines.send(line({"rank": rank}))
                    self._take(peer, replace(machine, rank=rank))
            if peer.rank in self._machines and self._machines[peer.rank].id == peer.id:
                self._silent[peer.rank] = 0.0

    def _free_rank(self, machine: Machine) -> int:
        """Return the machine rank for a launcher without one; 0 if there is none at the moment."""
        for rank in range(1, self._expected):
            holder, silent = self._machines.get(rank), self._silent.get(rank, 0.0)
            if holder is None or holder.id == machine.id:
                return rank
            # A launcher that loses its connection has connected again by then.
            is_gone = silent > (QUIET_SECONDS if rank in self._closed else REPORT_SECONDS)
            if is_gone or holder.state.is_final:
                return rank
        return 0

    def _take(self, peer: _Peer, machine: Machine) -> None:
        """Take the record of a launcher."""
        former = self._machines.get(machine.rank)
        if former is None or former.id != machine.id:
            conflict, runs = self._conflict(former, machine), self._machines[self._rank].started
            if not conflict and runs:
                # The other machines go on: only this one is not let in.
                then = f"{machine.named()} does not take part"
                conflict = compare([self._machines[self._rank], machine], then)[0]
            if conflict:
                self._warn(conflict)
                peer.lines.send(line({"rejected": conflict}))
                if not runs:
                    self._refuse(conflict)
                return
            # Notify the former launcher of this machine, if it runs.
            for other in self._peers:
                if other.rank == machine.rank and other is not peer:
                    other.lines.send(line({"replaced": machine.host}))
        peer.rank, peer.id = machine.rank, machine.id
        self._closed.discard(machine.rank)
        for other in list(self._peers):
            if other.rank == machine.rank and other is not peer and other.id == machine.id:
                self._drop(other)  # the same launcher has connected again
        self._machines[machine.rank] = machine
        self._touch(machine.rank)
        if former is None or former.id != machine.id:
            self._check(machine)
        if machine.state is State.FAILED and machine.cause is not None and machine.round <= 0 and not machine.started:
            self._refuse(f"{machine.named()}: {machine.cause.text}", machine.cause.code)

    def _conflict(self, former: Machine | None, machine: Machine) -> str:
        """Why a second launcher of a machine rank is none that replaces the first, or empty."""
        if former is None:
            return ""
        here = former.rank == self._rank or any(peer.rank == former.rank for peer in self._peers)
        elsewhere = (former.host, former.address) != (machine.host, machine.address)
        is_quiet = not here or self._silent.get(former.rank, 0.0) > QUIET_SECONDS
        if former.rank != self._rank and (is_quiet or not elsewhere):
            return ""
        where = " and ".join(f"{one.host} ({one.address})" if one.address else one.host for one in (former, machine))
        return (
            f"two launchers were started with --machine_rank {machine.rank}, on {where}. Give each machine a rank of "
            "its own, from 0 to num_machines - 1."
        )

    def _check(self, machine: Machine) -> None:
        refused, warned = compare([self._machines[self._rank], machine])
        if refused:
            # All that are here, so that the table is whole.
            self._refuse(compare(list(self._machines.values()))[0])
        elif warned:
            self._warn(warned)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            say(text)

    # -- turns -------------------------------------------------------------------------------------------------------

    def _count(self, seconds: float) -> None:
        for rank in self._machines:
            if rank != self._rank:
                self._silent[rank] = self._silent.get(rank, 0.0) + seconds

    def _flush(self, beat: bool) -> None:
        # Machines that wait for their start need nothing of each other before the next beat. If each learned of every
        # arrival at once, a thousand machines would read a million records.
        relaxed = not beat and all(one.waits for one in self._machines.values())
        silent = {str(rank): round(seconds, 1) for rank, seconds in self._silent.items()}
        written: dict[tuple[Any, ...], bytes] = {}  # most launchers are sent the same
        for peer in list(self._peers):
            told = self._versions if not relaxed or not peer.sent else {}
            changed = tuple(rank for rank, version in told.items() if peer.sent.get(rank) != version)
            content = (changed, beat or not peer.sent, self.refusal is not None and not peer.knows_refusal)
            if content not in written:
                written[content] = self._message(*content, silent)
            try:
                peer.lines.send(written[content])
            except OSError:
                self._drop(peer)
                continue
            peer.sent |= {rank: self._versions[rank] for rank in changed}
            peer.knows_refusal = peer.knows_refusal or content[-1]

    def _message(self, changed: Sequence[int], beat: bool, refused: bool, silent: Mapping[str, float]) -> bytes:
        message: dict[str, Any] = {"silent": silent} if beat else {}
        if changed:
            message["machines"] = [self._machines[rank].encode(with_facts=False) for rank in changed]
        if refused and self.refusal is not None:
            message["refused"] = asdict(self.refusal)
        return line(message) if message else b""

    def _end(self) -> None:
        self._listener.close()
        with self._changed:
            for peer in self._peers:
                peer.lines.close()


def _at(machine: Machine, address: str) -> Machine:
    return replace(machine, address=address)


class Member(Board):
    """The board of a machine of another rank than 0. It connects, and connects again, until it is closed.

    Args:
        me: the record of this machine.
        main: host and port of machine rank 0.
        token: of the run.
        give_up_seconds: when a silent machine is declared lost; 0 for never.
    """

    version: int

    def __init__(self, me: Machine, main: tuple[str, int], token: bytes, give_up_seconds: float) -> None:
        super().__init__(me, give_up_seconds)
        self._main, self._token = main, token
        self._lines: Lines | None = None
        self._is_sent = False
        self._known: dict[str, Any] = {}  # the record of this machine, as machine rank 0 has sent it back
        self._attempt: threading.Thread | None = None
        self._heard = self._unheard = self._connected = self._pause = self._misled = 0.0
        self.problem: str = "no attempt yet"
        """Why machine rank 0 is not connected, for messages."""
        self.met: bool = False
        """Whether the records of machine rank 0 have arrived."""
        self.replaced_by: str = ""
        """Host of another launcher that has taken over the rank of this machine."""
        self._thread.start()

    def _own_record_changed(self) -> None:
        self._is_sent = False

    def _is_delivered(self) -> bool:
        if self._lines is None or self._silent.get(0, 0.0) > QUIET_SECONDS:
            return True  # it cannot be
        return self._known == self.me.encode(with_facts=False) | {"address": self._known.get("address")}

    # -- connection --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect, in a thread of its own: a host that does not answer takes seconds."""
        is_other = False
        try:
            connection = connect(self._main, self._token, HANDSHAKE_SECONDS)
        except TokenError:
            problem = (
                f"the launcher there has another token: set {TOKEN_VARIABLE} to the same value on every machine, "
                "or on none"
            )
            is_other = True
        except (ConnectionRefusedError, socket.gaierror) as error:
            problem = error.strerror or str(error)
        except (OSError, UnicodeError) as error:
            is_other = _reached(self._main)
            problem = f"what listens there is not the launcher of machine rank 0 ({error})" if is_other else str(error)
        else:
            with self._changed:
                self._use(connection)
            self._wake()
            return
        with self._changed:
            self.problem, self._attempt = problem, None
            self._pause = _RETRY_SECONDS
            if not is_other:
                self._misled = 0.0
            elif not self._misled:
                self._misled = 0.001

    def _use(self, connection: socket.socket) -> None:
        self._attempt = None
        if self._closing:
            connection.close()
            return
        self._disconnect()
        self.own_address: str = str(connection.getsockname()[0]).removeprefix("::ffff:")
        self._lines = Lines(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._lines)
        self._is_sent, self._heard, self._unheard, self._connected, self._misled = False, 0.0, 0.0, 0.0, 0.0

    def _disconnect(self) -> None:
        if self._lines is not None:
            self._selector.unregister(self._lines.socket)
            self._lines.close()
            self._lines = None

    def hopeless(self) -> str:
        """Why this launcher cannot take part, once that is sure; else empty."""
        if self.replaced_by:
            return (
                f"another launcher was started with --machine_rank {self._rank}, on {self.replaced_by}: each machine "
                "needs a different rank"
            )
        with self._changed:
            return self.problem if self._misled > _UNKNOWN_SECONDS and not self.met else ""

    # -- messages ----------------------------------------------------------------------------------------------------

    def _readable(self, source: Any) -> None:
        with self._changed:
            if self._lines is None or source is not self._lines:
                return
            try:
                for text in self._lines.receive():
                    self._received(read_object(text))
            except (OSError, ValueError, TypeError) as error:
                self.problem = str(error)
                self._disconnect()

    def _received(self, message: Mapping[str, Any]) -> None:
        self._heard = 0.0
        if "rejected" in message:
            self.refusal: Cause = Cause(RAISED, str(message["rejected"]), 2)
        if "replaced" in message:
            self.replaced_by = str(message["replaced"])
        if "refused" in message:
            self.refusal = Cause.read(message["refused"])
        if "rank" in message and self._rank == ANY_RANK:
            me = self._machines.pop(ANY_RANK)
            self._rank = int(message["rank"])
            self._machines[self._rank] = replace(me, rank=self._rank)
            self._is_sent = False
        for machine in map(Machine.read, message.get("machines", ())):
            if machine.rank != self._rank:
                self._machines[machine.rank] = machine
            elif machine.id == self._machines[self._rank].id:
                self._known = machine.encode(with_facts=False)
        self.version += 1
        self.met = self.met or "machines" in message
        silent = silences(message.get("silent", {}))
        for rank in [rank for rank in self._machines if silent and rank not in (0, self._rank, *silent)]:
            del self._machines[rank]  # machine rank 0 has forgotten it
            self._silent.pop(rank, None)
            self._reported.pop(rank, None)
        for rank, seconds in silent.items():
            if rank != self._rank:
                self._silent[rank] = seconds
            else:
                # Silence that machine rank 0 counted before this connection does not count against it.
                self._unheard = min(seconds, self._connected)
        self._silent[0] = 0.0

    # -- turns -------------------------------------------------------------------------------------------------------

    def _count(self, seconds: float) -> None:
        self._heard += seconds
        self._connected += seconds
        self._pause -= seconds
        if self._misled:
            self._misled += seconds
        if self.met:
            self._silent[0] = self._silent.get(0, 0.0) + seconds

    def _flush(self, beat: bool) -> None:
        stalls = self._lines is None or max(self._heard, self._unheard) > _RENEW_SECONDS
        if stalls and self._attempt is None and self._pause <= 0:
            # The present connection is kept until another one is there: it may recover sooner.
            self._attempt = threading.Thread(target=self._connect, name="accel-launch-connect", daemon=True)
            self._attempt.start()
        if self._lines is None:
            return
        try:
            if not self._is_sent or (beat and self._rank == ANY_RANK):
                self._lines.send(line({"machine": self._machines[self._rank].encode(with_facts=True)}))
                self._is_sent = True
            else:
                self._lines.send(line({}) if beat else b"")
        except OSError as error:
            self.problem = str(error)
            self._disconnect()

    def _end(self) -> None:
        with self._changed:
            if self._lines is not None:
                with suppress(OSError):  # the connection has ended by itself
                    self._lines.send(line({"left": True}))
            self._disconnect()


def _reached(main: tuple[str, int]) -> bool:
    """Return True if something listens there."""
    try:
        with socket.create_connection(main, HANDSHAKE_SECONDS):
            return True
    except OSError:
        return False


def say(text: str) -> None:
    """Print a line of the launcher."""
    print(f"accel launch: {text}", file=sys.stderr, flush=True)


def token_of_run() -> bytes:
    """Return the token of the run, if the user has set one."""
    return read_token() if read_str(TOKEN_VARIABLE) else _NO_TOKEN


def join(
    host: str,
    port: int,
    rank: int,
    count: int,
    *,
    local_processes: int = 1,
    facts: Mapping[str, str] | None = None,
    give_up_seconds: float = 0.0,
) -> Board:
    """Return the board of a run of several machines.

    Args:
        host: the main address.
        port: the main port.
        rank: of this machine; ``ANY_RANK`` to be assigned one of 1 to ``count - 1``.
        count: machines of the run.
        local_processes: ranks of this machine.
        facts: what the machines must agree on.
        give_up_seconds: when a silent machine is declared lost; 0 for never.

    Raises:
        ConfigurationError: this machine has rank 0 and cannot listen at the main address, or is not reached there.
    """
    token = token_of_run()
    me = Machine(rank, uuid.uuid4().hex, socket.gethostname(), local_processes, facts=dict(facts or {}))
    if rank:
        return Member(me, (host, port), token, give_up_seconds)
    try:
        hub = Hub(me, listening_host(host), port, token, count, give_up_seconds)
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_port {port}: the launcher cannot listen there: {error.strerror or error}. Give another "
            "port, on all machines."
        ) from None
    try:
        _check_main_address(hub, host, port, token)
    except BaseException:
        hub.close(0)
        raise
    return hub


def _check_main_address(hub: Hub, host: str, port: int, token: bytes) -> None:
    """Check that this machine, which has rank 0, is reached under the main address, which may be translated."""
    if is_local(host):
        return
    try:
        connect((host, port), token, HANDSHAKE_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_ip {host} does not lead to this machine, which has --machine_rank 0: "
            f"{error.strerror or error}. The addresses of this machine ({socket.gethostname()}) are "
            f"{', '.join(addresses_here()) or 'unknown'}. Give one of them, on all machines, or give rank 0 to the "
            f"machine of {host}."
        ) from None
