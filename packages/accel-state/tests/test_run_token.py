"""The token of a run, and tunnels: who gets through, and what passes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.tunnel import TunnelClient, TunnelServer

TOKEN = run_token.make_token().encode()


class Echo:
    """A server that answers each piece with the same bytes in capitals, and ends when the client does."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data.upper())


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()


@pytest.fixture
def tunnel(echo: Echo) -> Iterator[TunnelServer]:
    server = TunnelServer("127.0.0.1", 0, echo.port, TOKEN, refused.append)
    refused.clear()
    yield server
    server.close()


refused: list[str] = []


def test_bytes_pass_both_ways_and_the_end_too(echo: Echo, tunnel: TunnelServer) -> None:
    client = TunnelClient(("127.0.0.1", tunnel.port), TOKEN)
    data = bytes(range(97, 123)) * 40_000  # more than the buffers of four sockets hold
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR))).start()
        assert run_token.receive(connection, len(data)) == data.upper()
        assert connection.recv(1) == b""
    # The server ends: what is connected through the tunnel notices.
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"A"
        echo.connections[-1].shutdown(socket.SHUT_RDWR)
        assert connection.recv(1) == b""
    client.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", client.port), timeout=1)


@pytest.mark.parametrize(
    "request_", [b"POST /replica/accel_0/kill HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64), b"\0" * 64], ids=["http", "zeros"]
)
def test_without_the_token_nothing_reaches_the_server(echo: Echo, tunnel: TunnelServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tunnel.port), timeout=30) as connection:
        connection.sendall(request_)
        answer = b"".join(iter(lambda: connection.recv(100), b""))
    assert len(answer) == 32  # the challenge
    assert not echo.connections and refused == ["127.0.0.1"]


def test_another_token_and_a_recorded_proof_are_refused(echo: Echo, tunnel: TunnelServer) -> None:
    with pytest.raises(run_token.TokenError, match=str(tunnel.port)):
        run_token.connect(("127.0.0.1", tunnel.port), b"x" * 32, 30)
    with socket.create_connection(("127.0.0.1", tunnel.port), timeout=30) as connection:
        theirs, ours = run_token.receive(connection, 32), b"o" * 32
        proof = ours + run_token.sign(TOKEN, "client", theirs, ours)
        connection.sendall(proof)
        assert run_token.receive(connection, 32) == run_token.sign(TOKEN, "server", theirs, ours)
    with socket.create_connection(("127.0.0.1", tunnel.port), timeout=30) as connection:
        run_token.receive(connection, 32)
        connection.sendall(proof)
        assert connection.recv(1) == b""
    deadline = time.monotonic() + 60
    while not echo.connections and time.monotonic() < deadline:  # the tunnel connects after it has proved the token
        time.sleep(0.05)
    assert len(echo.connections) == 1


def test_a_server_without_the_token_is_noticed() -> None:
    """One that sends back what it gets, for example."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def mirror() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"c" * 32)
                connection.sendall(run_token.receive(connection, 64)[32:])

        threading.Thread(target=mirror, daemon=True).start()
        with pytest.raises(run_token.TokenError):
            run_token.connect(server.getsockname(), TOKEN, 30)


def test_a_client_that_sends_too_slowly_is_left(echo: Echo) -> None:
    left, right = socket.socketpair()
    with left, right:
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.05):
                try:
                    right.send(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(TimeoutError):  # a TokenError comes after all 64 bytes, in 3 seconds
            run_token.accept(left, TOKEN, 0.5)
        stop.set()
        thread.join()


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_token.VARIABLE, TOKEN.decode())
    assert run_token.read_token() == TOKEN
    for bad in ("", "tooshort"):
        monkeypatch.setenv(run_token.VARIABLE, bad)
        with pytest.raises(ConfigurationError, match=run_token.VARIABLE) as caught:
            run_token.read_token()
        assert not bad or bad not in str(caught.value)
    assert run_token.make_token() != run_token.make_token()


def test_parts_of_a_signature_are_told_apart() -> None:
    assert run_token.sign(TOKEN, "a", "bc") != run_token.sign(TOKEN, "ab", "c")
    assert run_token.is_signed(run_token.sign(TOKEN, "a", 1), TOKEN, "a", "1")
