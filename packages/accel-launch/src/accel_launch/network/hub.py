"""The board on machine rank 0, which the other launchers connect to."""

from __future__ import annotations

import math
import selectors
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from accel_state import run_token
from accel_state.ports import listen

from .agreement import compare
from .board import HANDSHAKE_SECONDS, QUIET_SECONDS, Board, Lines, Refusal, Say
from .fields import read_object
from .records import Machine, State, line

# So many connections may be about to prove that they have the token; further ones are closed at once.
_HANDSHAKES = 256
_NAMED_STRANGERS = 8


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
        give_up_seconds: when a silent machine is given up; 0 for never.
        say: prints a line.

    Raises:
        OSError: it cannot listen there.
    """

    version: int

    def __init__(
        self, me: Machine, host: str, port: int, token: bytes, count: int, give_up_seconds: float, say: Say
    ) -> None:
        super().__init__(me, give_up_seconds, say)
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self.port: int = int(self._listener.getsockname()[1])
        self._token, self._expected = token, count
        self._handshakes = threading.BoundedSemaphore(_HANDSHAKES)
        self._versions = {me.rank: 1}
        self._peers: list[_Peer] = []
        self._closed: set[int] = set()  # ranks of machines whose launcher has closed its connection
        self.closed_seconds: float = math.inf
        """When a machine is given up whose launcher has closed its connection, and has not connected again."""
        self._left = {me.id}
        """Ids of launchers that have said that they leave."""
        self._strangers: set[str] = set()
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
            self.refusal: Refusal = Refusal(text, code)
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
        """Whether every launcher that can be reached has left: they are told, and then leave."""
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
            run_token.accept(connection, self._token, HANDSHAKE_SECONDS)
        except run_token.TokenError:
            connection.close()
            self._note_stranger(address)
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

    def _note_stranger(self, address: str) -> None:
        with self._changed:
            if address in self._strangers or len(self._strangers) >= _NAMED_STRANGERS:
                return
            self._strangers.add(address)
        self._say(
            f"refused {address}, which does not have the token of this run: set {run_token.VARIABLE} to the same value "
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
                self._take(peer, _at(Machine.read(message["machine"]), peer.address))
            if peer.rank in self._machines and self._machines[peer.rank].id == peer.id:
                self._silent[peer.rank] = 0.0

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
            # The former launcher of this machine, if it runs, is told.
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
            self._say(text)

    # -- turns -------------------------------------------------------------------------------------------------------

    def _count(self, seconds: float) -> None:
        for rank in self._machines:
            if rank != self._rank:
                self._silent[rank] = self._silent.get(rank, 0.0) + seconds

    def _flush(self, beat: bool) -> None:
        # Machines that wait for their start need nothing of each other before the next beat. If each heard of every
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
            message["refused"] = {"text": self.refusal.text, "code": self.refusal.code}
        return line(message) if message else b""

    def _end(self) -> None:
        self._listener.close()
        with self._changed:
            for peer in self._peers:
                peer.lines.close()


def _at(machine: Machine, address: str) -> Machine:
    return replace(machine, address=address)
