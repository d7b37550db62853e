"""The token of a run: processes that have it belong to the run. It is compared, and never sent.

Two processes that connect prove to each other that they have the token: each signs what the other one drew with it
(HMAC-SHA256). So what is listened to on the network, or was recorded, proves nothing later. What follows over the
connection is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time

from .env import read_str
from .errors import ConfigurationError

VARIABLE = "ACCELERATE_RUN_TOKEN"
"""The variable in which a launcher passes the token to its processes, and the user to launchers on several machines."""

_SHORTEST = 16
_DRAWN = 32
_SIGNATURE = hashlib.sha256().digest_size


class TokenError(ConnectionError):
    """The other side of a connection does not have the token of this run."""


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(32)


def read_token() -> bytes:
    """Return the token of this run.

    Raises:
        ConfigurationError: the variable is unset, or too short to be a secret.
    """
    token = read_str(VARIABLE) or ""
    if len(token) < _SHORTEST:
        # Not the value: this text may end in a log.
        found = f"has {len(token)} characters" if token else "is not set"
        raise ConfigurationError(
            f"{VARIABLE} {found}. It is the secret of a run, of at least {_SHORTEST} characters: `accel launch` makes "
            "one on a single machine. For several machines set the same one on each before you launch, for example "
            f'export {VARIABLE}="$(openssl rand -hex 32)", and copy its value.'
        )
    return token.encode()


def sign(token: bytes, *parts: bytes | str | int) -> bytes:
    """Return a signature of texts, numbers or bytes, which only a process with the token can make."""
    digest = hmac.new(token, digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def is_signed(signature: bytes, token: bytes, *parts: bytes | str | int) -> bool:
    """Return True if a signature is that of :func:`sign`; compared in constant time."""
    return hmac.compare_digest(signature, sign(token, *parts))


def accept(connection: socket.socket, token: bytes, timeout: float) -> None:
    """Have a client that has just connected prove that it has the token, and prove it to the client.

    Args:
        connection: to the client.
        token: of this run.
        timeout: seconds for everything; the socket has it afterwards.

    Raises:
        TokenError: it does not have the token.
        OSError: it closed the connection, or did not answer in time.
    """
    ours, deadline = os.urandom(_DRAWN), time.monotonic() + timeout
    connection.settimeout(timeout)
    connection.sendall(ours)
    # A deadline for the whole: a client that sends one byte at a time must not hold the connection for long.
    answer = receive(connection, _DRAWN + _SIGNATURE, deadline)
    connection.settimeout(timeout)
    theirs, signature = answer[:_DRAWN], answer[_DRAWN:]
    if not is_signed(signature, token, "client", ours, theirs):
        raise TokenError("a process without the token of this run has connected")
    connection.sendall(sign(token, "server", ours, theirs))


def connect(address: tuple[str, int], token: bytes, timeout: float) -> socket.socket:
    """Connect to a server that calls :func:`accept`.

    Args:
        address: host and port.
        token: of this run.
        timeout: seconds for each step; the socket that is returned has it too.

    Raises:
        TokenError: it has another token.
        OSError: it cannot be reached, or is not such a server.
    """
    connection = socket.create_connection(address, timeout)
    try:
        theirs = receive(connection, _DRAWN)
        ours = os.urandom(_DRAWN)
        connection.sendall(ours + sign(token, "client", theirs, ours))
        try:
            signature = receive(connection, _SIGNATURE)
        except ConnectionError:  # what a server does that was shown another token
            signature = b""
        if not is_signed(signature, token, "server", theirs, ours):
            raise TokenError(f"{address[0]}:{address[1]} does not have the token of this run ({VARIABLE})")
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly so many bytes.

    Args:
        connection: where to read.
        size: how many.
        deadline: until when, by :func:`time.monotonic`; without it the timeout of the socket holds for each part.

    Raises:
        ConnectionError: the other side ended before.
        OSError: they did not come in time.
    """
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def receive_into(connection: socket.socket, target: memoryview, deadline: float | None = None) -> None:
    """Fill a buffer; otherwise like :func:`receive`."""
    filled, size = 0, len(target)
    while filled < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(target[filled:])
        if not count:
            raise ConnectionError(f"the connection ended after {filled} of {size} bytes")
        filled += count
