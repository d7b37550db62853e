"""The board on the other machines, which connect to that of machine rank 0."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from accel_state import run_token

from .board import HANDSHAKE_SECONDS, QUIET_SECONDS, Board, Lines, Refusal, Say, silences
from .fields import checked, read_object
from .records import Machine, line

# A connection on which nothing arrives for so long, here or there, is replaced: after a lost packet TCP waits longer
# and longer, in one direction or in both.
_RENEW_SECONDS = 4.0
_RETRY_SECONDS = 0.3
# What listens there for so long without being the launcher of this run is something else.
_STRANGER_SECONDS = 8.0


class Member(Board):
    """The board of a machine of another rank than 0. It connects, and connects again, until it is closed.

    Args:
        me: the record of this machine.
        main: host and port of machine rank 0.
        token: of the run.
        give_up_seconds: when a silent machine is given up; 0 for never.
        say: prints a line.
    """

    version: int

    def __init__(self, me: Machine, main: tuple[str, int], token: bytes, give_up_seconds: float, say: Say) -> None:
        super().__init__(me, give_up_seconds, say)
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
        stranger = False
        try:
            connection = run_token.connect(self._main, self._token, HANDSHAKE_SECONDS)
        except run_token.TokenError:
            problem = (
                f"the launcher there has another token: set {run_token.VARIABLE} to the same value on every machine, "
                "or on none"
            )
            stranger = True
        except (ConnectionRefusedError, socket.gaierror) as error:
            problem = error.strerror or str(error)
        except (OSError, UnicodeError) as error:
            stranger = _reached(self._main)
            problem = f"what listens there is not the launcher of machine rank 0 ({error})" if stranger else str(error)
        else:
            with self._changed:
                self._use(connection)
            self._wake()
            return
        with self._changed:
            self.problem, self._attempt = problem, None
            self._pause = _RETRY_SECONDS
            if not stranger:
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
        return self.stranger()

    def stranger(self) -> str:
        """What is wrong with the program that listens at the main address, once that is sure; else empty."""
        with self._changed:
            return self.problem if self._misled > _STRANGER_SECONDS and not self.met else ""

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
            self.refusal: Refusal = Refusal(str(message["rejected"]))
        if "replaced" in message:
            self.replaced_by = str(message["replaced"])
        if "refused" in message:
            fields = checked(message["refused"], text=str, code=int)
            self.refusal = Refusal(fields["text"], fields["code"])
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
            if not self._is_sent:
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
    """Whether something listens there."""
    try:
        with socket.create_connection(main, HANDSHAKE_SECONDS):
            return True
    except OSError:
        return False
