"""Launchers on several machines find the lighthouse of their run, and no other."""

from __future__ import annotations

import socket
import threading

import pytest

from accel_launch.lighthouse import Lighthouse
from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions, RendezvousOptions
from accel_state.tunnel import TunnelServer


def joined(port: int, token: str) -> Lighthouse:
    """The lighthouse as the second of two machines sees it."""
    rendezvous = RendezvousOptions(machine_rank=1, main_process_ip="127.0.0.1", main_process_port=port)
    return Lighthouse(FaultToleranceOptions(), rendezvous, 2, token, log=False, say=print)


def test_the_way_to_the_lighthouse_of_another_machine() -> None:
    token = run_token.make_token()
    with socket.create_server(("127.0.0.1", 0)) as server:
        tunnel = TunnelServer("127.0.0.1", 0, server.getsockname()[1], token.encode())
        lighthouse = joined(tunnel.port, token)
        port = int(lighthouse.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"join")
            while True:  # the launcher has looked before
                connection, _ = server.accept()
                with connection:
                    if connection.recv(4) == b"join":
                        break
        assert lighthouse.restart_if_ended() is None
        lighthouse.close()
        with pytest.raises(ConfigurationError, match=str(tunnel.port)) as caught:
            joined(tunnel.port, "another token of another run")
        assert run_token.VARIABLE in str(caught.value) and "another token of" not in str(caught.value)
        tunnel.close()


def test_another_server_at_the_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port} is not the launcher"):
            joined(port, run_token.make_token())
