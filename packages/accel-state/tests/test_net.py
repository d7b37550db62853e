"""Free and used ports."""

from __future__ import annotations

import random
import socket

from accel_state import net
from accel_state.net import get_free_port, is_port_in_use


def listen() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1)
    return server


def test_a_free_port_can_be_listened_on():
    for _ in range(20):
        port = get_free_port()
        assert 0 < port < 65536
        assert not is_port_in_use(port)
        with socket.socket() as server:
            server.bind(("", port))
            server.listen(1)
            assert is_port_in_use(port)


def test_a_used_port_is_seen():
    with listen() as server:
        assert is_port_in_use(server.getsockname()[1])


def test_a_used_port_is_never_given(monkeypatch):
    with listen() as server:
        used = server.getsockname()[1]
        # Only the used one is left below the range of outgoing connections, so the kernel is asked.
        monkeypatch.setattr(net, "_LOWEST_PORT", used)
        monkeypatch.setattr(net, "_first_ephemeral_port", lambda: used + 1)
        assert get_free_port() != used


def test_without_room_below_the_ephemeral_range_the_kernel_is_asked(monkeypatch, tmp_path):
    ports = tmp_path / "range"
    ports.write_text("1024\t65535\n")
    monkeypatch.setattr(net, "_EPHEMERAL_RANGE", ports)
    assert 1024 <= get_free_port() < 65536
    monkeypatch.setattr(net, "_EPHEMERAL_RANGE", tmp_path / "missing")
    assert 1024 <= get_free_port() < 65536


def test_ports_come_from_below_the_ephemeral_range(monkeypatch, tmp_path):
    ports = tmp_path / "range"
    ports.write_text("32768\t60999\n")
    monkeypatch.setattr(net, "_EPHEMERAL_RANGE", ports)
    assert all(20000 <= get_free_port() < 32768 for _ in range(20))


def test_the_default_is_torchs_port():
    if not is_port_in_use(29500):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", 29500))
            server.listen(1)
            assert is_port_in_use()
    else:
        assert is_port_in_use()


def test_a_seed_is_neither_used_nor_disturbed():
    random.seed(3)
    first = get_free_port()
    drawn = random.random()
    random.seed(3)
    second = get_free_port()
    assert random.random() == drawn
    assert first != second or get_free_port() != first
