"""What the launchers send each other: a record of each machine, again whenever it changes, as lines of JSON.

Nothing that is received is executed: it is JSON, whose fields are checked one by one. Torch-free.
"""

from __future__ import annotations

import enum
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MAX_LINE = 4 << 20
"""Bytes of a message; facts of a machine are a few thousand."""


class State(enum.Enum):
    """What the ranks of a machine do."""

    WAITING = "waiting"
    """The launcher waits for the other machines."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"
    """Ended by a signal with ranks that save on it, or because another machine failed."""
    LEFT = "left"
    """The machine leaves the others (a range of machines)."""

    @property
    def is_final(self) -> bool:
        """True if the launcher is about to end, so that its silence means nothing."""
        return self not in (State.WAITING, State.RUNNING)


ANY_RANK = -1
"""The machine rank of a launcher to which machine rank 0 has not yet assigned one."""
FIRST_SEAT = 1 << 20
"""Machines of a range have a number from here on instead of a machine rank, which follows from who takes part."""

INTERRUPTED, RAISED, KILLED, LOST, ECHO, STOPPED = range(6)
"""Kinds of a cause, the likeliest to be the first one first: a failed connection follows from what the others did."""


@dataclass(frozen=True)
class Cause:
    """Why the ranks of a machine ended, or were started again."""

    kind: int
    text: str  # a sentence for the user
    code: int  # exit code of the launchers
    round: int = 0  # the start that it ended

    @classmethod
    def read(cls, data: Any) -> Cause:
        """Return a cause from JSON.

        Raises:
            ValueError: it is something else.
        """
        fields = checked(data, kind=int, text=str, code=int, round=int)
        return cls(**fields)


@dataclass(frozen=True)
class Machine:
    """One launcher's record."""

    rank: int  # machine rank
    id: str  # of the launcher: another one after it was started again
    host: str
    local_processes: int = 1  # 0 where ranks do not follow from those of the machines: replicas
    address: str = ""  # by which the others reach it; empty until it is known
    facts: Mapping[str, str] = field(default_factory=dict)  # what the machines must agree on; for machine rank 0 only
    round: int = -1  # the start that it wants to take part in, or takes part in; 0 is the first
    members: Mapping[str, str] = field(default_factory=dict)  # ids by machine rank of that start; empty before it
    port: int = 0  # of the store of the ranks, from machine rank 0
    restarts: int = 0  # failures of the run so far, with a range of machines
    held: Mapping[str, str] = field(default_factory=dict)  # ids that are not taken in at the moment, and why
    reports: Mapping[str, str] = field(default_factory=dict)  # how far its replicas are, by name
    state: State = State.WAITING
    cause: Cause | None = None

    @property
    def started(self) -> bool:
        """True if its ranks were started in its round."""
        return bool(self.members)

    @property
    def waits(self) -> bool:
        """True if it waits for a start."""
        return self.state is State.WAITING and not self.started

    def named(self) -> str:
        """Return the machine in a sentence: rank, host, address and its ranks."""
        if self.rank >= FIRST_SEAT:
            return f"machine {self.host} ({self.address})" if self.address else f"machine {self.host}"
        first, count = self.rank * self.local_processes, self.local_processes
        ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}" if count else ""
        return f"machine rank {self.rank} ({', '.join(filter(None, (self.host, self.address, ranks)))})"

    def encode(self, *, with_facts: bool) -> dict[str, Any]:
        """Return the record as JSON; facts are for machine rank 0 only, which compares them."""
        shown = self if with_facts else replace(self, facts={})
        return {**asdict(shown), "state": self.state.value}

    @classmethod
    def read(cls, data: Any) -> Machine:
        """Return a record from JSON.

        Raises:
            ValueError: it is something else.
        """
        numbers = dict.fromkeys(("rank", "local_processes", "round", "port", "restarts"), int)
        texts = dict.fromkeys(("id", "host", "address", "state"), str)
        fields = checked(data, **numbers, **texts, facts=dict, members=dict, held=dict, reports=dict)
        for name in ("facts", "members", "held", "reports"):
            fields[name] = {str(key): str(value) for key, value in fields[name].items()}
        cause = data.get("cause")
        return cls(**{**fields, "state": State(fields["state"]), "cause": None if cause is None else Cause.read(cause)})


def line(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def read_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: it is something else.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    checked(data)
    return dict(data)


def checked(data: Any, **types: type) -> dict[str, Any]:
    """Return the fields of a JSON object, each of the given type.

    Raises:
        ValueError: one is missing or has another type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__} is not a JSON object")
    for name, kind in types.items():
        if not isinstance(data.get(name), kind):
            raise ValueError(f"{name}={data.get(name)!r} is not {kind.__name__}")
    return {name: data[name] for name in types}


def silences(data: Any) -> Mapping[int, float]:
    """Return seconds by machine rank, from JSON.

    Raises:
        ValueError: it is something else.
    """
    checked(data)
    return {int(rank): float(seconds) for rank, seconds in data.items()}


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
        """Return the lines that have arrived.

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
