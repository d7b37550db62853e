"""Free and used ports."""

from __future__ import annotations

import random
import socket
import sys

import pytest

from accel_state import ports
from accel_state.ports import get_free_port, is_port_in_use, reserved_port


def listen() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1)
    return server


def test_a_free_port_can_be_listened_on(monkeypatch):
    # Others on this machine, who take one of the usual ports from time to time, must not come in between.
    monkeypatch.setattr(ports, "_LOWEST_PORT", 5000)
    monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: 15000)
    for _ in range(20):
        port = get_free_port()
        assert 0 < port < 65536
        assert not is_port_in_use(port)
        with socket.create_server(("", port)):
            assert is_port_in_use(port)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a reserved port cannot be listened on")
@pytest.mark.parametrize("is_low", [True, False])
def test_a_reserved_port_is_given_to_nobody_else_and_can_be_listened_on(monkeypatch, is_low):
    if not is_low:
        monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: ports._LOWEST_PORT)
    with reserved_port() as port:
        assert not is_port_in_use(port)
        monkeypatch.setattr(ports, "_LOWEST_PORT", port)
        monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: port + 1)
        assert get_free_port() != port
        with reserved_port() as other:
            assert other != port
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            with socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6):
                assert is_port_in_use(port)


def test_a_used_port_is_seen():
    with listen() as server:
        assert is_port_in_use(server.getsockname()[1])


def test_a_used_port_is_never_given(monkeypatch):
    with listen() as server:
        used = server.getsockname()[1]
        # Only the used one is left below the range of outgoing connections, so the kernel is asked.
        monkeypatch.setattr(ports, "_LOWEST_PORT", used)
        monkeypatch.setattr(ports, "_first_ephemeral_port", lambda: used + 1)
        assert get_free_port() != used


def test_without_room_below_the_ephemeral_range_the_kernel_is_asked(monkeypatch, tmp_path):
    range_file = tmp_path / "range"
    range_file.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", range_file)
    assert 1024 <= get_free_port() < 65536
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", tmp_path / "missing")
    assert 1024 <= get_free_port() < 65536


def test_ports_come_from_below_the_ephemeral_range(monkeypatch, tmp_path):
    range_file = tmp_path / "range"
    range_file.write_text("32768\t60999\n")
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", range_file)
    assert all(25000 <= get_free_port() < 32768 for _ in range(20))


def test_the_default_is_torchs_port(monkeypatch):
    asked = []

    class Client(socket.socket):
        # Which program listens there just now is for no test to decide.
        def connect_ex(self, address):
            asked.append(address)
            return 0

    monkeypatch.setattr(socket, "socket", Client)
    assert is_port_in_use()
    assert asked == [("localhost", 29500)]


def test_a_seed_is_neither_used_nor_disturbed():
    random.seed(3)
    first = get_free_port()
    drawn = random.random()
    random.seed(3)
    second = get_free_port()
    assert random.random() == drawn
    assert first != second or get_free_port() != first
