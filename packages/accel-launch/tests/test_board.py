"""The board of the launchers: real connections on loopback, through a cable that can be cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accel_launch.network import board
from accel_launch.network.board import Hub, Member, join
from accel_launch.network.interfaces import interface_of, interface_variables
from accel_launch.network.peers import Peers
from accel_launch.network.records import ECHO, KILLED, LOST, Cause, Machine, State
from accel_state import run_token
from accel_state.ports import listen

SHORT = 2.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    """What is not the launcher of the run is recognised sooner."""
    monkeypatch.setattr(board, "_UNKNOWN_SECONDS", 1.0)
    monkeypatch.setattr(board, "HANDSHAKE_SECONDS", 1.0)


@pytest.fixture
def boards():
    """Make boards, which are closed at the end."""
    made = []

    def make(port: int, rank: int, count: int = 2, **options):
        made.append(join("127.0.0.1", port, rank, count, give_up_seconds=SHORT, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close(0)


def test_a_cut_is_noticed_on_both_sides_and_so_is_its_end(boards, cable, wait_until, monkeypatch, capfd) -> None:
    monkeypatch.setattr(board, "REPORT_SECONDS", 1.0)
    hub = boards(0, 0)
    line = cable(hub.port)
    other = boards(line.port, 1)
    wait_until(lambda: len(hub.machines()) == len(other.machines()) == 2, "both are here")
    peers = [Peers(one, -1, 2) for one in (hub, other)]
    assert [one.failure() for one in peers] == [None, None]
    line.plugged.clear()
    wait_until(lambda: all(one.failure() is not None for one in peers), "both give the other one up")
    first, second = (one.failure() for one in peers)
    assert (first.kind, second.kind) == (LOST, LOST)
    assert "machine rank 1" in first.text and "machine rank 0" in second.text
    line.plugged.set()
    wait_until(lambda: all(one.failure() is None for one in peers), "both are back")
    told = capfd.readouterr().err
    assert "machine rank 1" in told and "machine rank 0" in told and told.count("is back after") >= 2, told


@contextmanager
def joined(cable: Any, wait_until: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Two launchers that have met over a cable."""
    hub = join("127.0.0.1", 0, 0, 2)
    line = cable(hub.port)
    other = join("127.0.0.1", line.port, 1, 2)
    try:
        wait_until(lambda: len(hub.machines()) == len(other.machines()) == 2, "both are here")
        yield hub, line, other
    finally:
        other.close(0)
        hub.close(0)


@pytest.mark.slow  # 6 s of silence; a cut in both directions is fast
def test_a_connection_that_stalls_in_one_direction_is_replaced(cable, wait_until, monkeypatch) -> None:
    """With lost packets TCP retries later and later, and the launcher that does not arrive hears the other one well."""
    monkeypatch.setattr(board, "_RENEW_SECONDS", 2.0)
    with joined(cable, wait_until) as (hub, line, other):
        for number in (7, 8):  # twice: what was counted for the first connection does not hold for the second one
            line.stall()
            other.post(port=number)
            wait_until(lambda number=number: hub.machines()[1].port == number, "the record arrives all the same")


def test_a_connection_that_recovers_is_used_although_no_other_can_be_made(cable, wait_until, monkeypatch) -> None:
    monkeypatch.setattr(board, "_RENEW_SECONDS", 1.0)
    with joined(cable, wait_until) as (hub, line, other):
        line.refuse()
        line.plugged.clear()
        wait_until(lambda: "refused" in other.problem.lower(), "it has tried to connect again")
        line.plugged.set()
        other.post(port=7)
        wait_until(lambda: hub.machines()[1].port == 7, "the record arrives all the same")


def test_a_launcher_that_connects_again_hears_how_the_run_ended(cable, wait_until) -> None:
    """Before, machine rank 0 left with the last connection, and the other one gave it up after 30 s."""
    hub = join("127.0.0.1", 0, 0, 2)
    line = cable(hub.port)
    other = join("127.0.0.1", line.port, 1, 2)
    wait_until(lambda: len(hub.machines()) == len(other.machines()) == 2, "both are here")
    line.plugged.clear()
    line.drop()
    hub.post(state=State.SUCCEEDED)
    wait_until(lambda: not hub._peers, "the connection has ended on the side of machine rank 0")
    leaving = threading.Thread(target=hub.close)
    leaving.start()
    line.plugged.set()
    try:
        wait_until(lambda: other.machines()[0].state is State.SUCCEEDED, "the other machine hears of the end", 30)
    finally:
        other.close(0)
        leaving.join()


def test_a_machine_that_ends_in_order_is_not_lost(boards, wait_until) -> None:
    hub = boards(0, 0)
    other = boards(hub.port, 1)
    wait_until(lambda: len(hub.machines()) == 2, "both are here")
    other.post(state=State.SUCCEEDED)
    other.close()
    time.sleep(SHORT + 1)
    assert hub.silent(1) > SHORT and hub.lost() == []


def test_what_happened_first_is_told_on_every_machine(boards, wait_until) -> None:
    """A broken connection, which is noticed at once, is only the echo of a kill that is told later."""
    hub = boards(0, 0, 3)
    members = [boards(hub.port, rank, 3) for rank in (1, 2)]
    everyone = [hub, *members]
    wait_until(lambda: all(len(one.machines()) == 3 for one in everyone), "all are here")
    for one in everyone:
        one.post(round=0, members={"0": "x"}, state=State.RUNNING)
    peers = [Peers(one, 0, 3) for one in everyone]
    peers[0].post(State.FAILED, Cause(ECHO, "rank 0 lost a connection", 1))
    wait_until(lambda: peers[1].failure() is not None, "machine rank 1 hears of it")
    peers[2].post(State.FAILED, Cause(KILLED, "rank 2 was killed", 137))
    peers[1].post(State.ENDED)
    assert [one.settle() for one in peers] == [Cause(KILLED, "rank 2 was killed", 137)] * 3


def test_machines_that_wait_are_told_of_each_other_once_a_beat(boards, wait_until, monkeypatch) -> None:
    """Else the first of a thousand machines would read a record for each that arrives; a start is told at once."""
    monkeypatch.setattr(board, "BEAT_SECONDS", 15.0)  # no beat during this test
    hub = boards(0, 0, 4)
    members = []
    for rank in (1, 2, 3):
        members.append(boards(hub.port, rank, 4))
        wait_until(lambda: len(members[-1].machines()) == len(members) + 1, "it has the records of those before it")
    wait_until(lambda: len(hub.machines()) == 4, "machine rank 0 knows of all at once")
    time.sleep(0.3)
    assert [len(one.machines()) for one in members] == [2, 3, 4]
    hub.post(round=0, members={"0": "x"}, state=State.RUNNING)
    wait_until(lambda: all(len(one.machines()) == 4 and one.machines()[0].started for one in members), "all are told")


def test_machines_with_different_tokens_do_not_meet(boards, wait_until, monkeypatch, capfd) -> None:
    monkeypatch.setenv(run_token.VARIABLE, "a" * 32)
    hub = boards(0, 0)
    monkeypatch.setenv(run_token.VARIABLE, "b" * 32)
    other = boards(hub.port, 1)
    wait_until(lambda: bool(other.hopeless()), "it is sure about that")
    assert run_token.VARIABLE in other.hopeless() and len(hub.machines()) == 1
    told = capfd.readouterr().err
    assert "refused 127.0.0.1" in told and told.count("refused") == 1 and "aaaa" not in told + other.hopeless()


# That a server which says nothing is not the launcher shows after a time limit only.
@pytest.mark.parametrize("answer", [pytest.param(b"", marks=pytest.mark.slow), b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_server_is_recognised(boards, wait_until, answer: bytes) -> None:
    listener = listen("127.0.0.1", 0)

    def serve() -> None:
        connections = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.sendall(answer)
            connections.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    other = boards(listener.getsockname()[1], 1)
    wait_until(lambda: bool(other.hopeless()), "it is sure about that")
    assert "not the launcher" in other.hopeless()
    listener.close()


def test_a_launcher_of_rank_0_that_is_started_again_is_found(boards, free_port, wait_until) -> None:
    port = free_port()
    hub = boards(port, 0)
    other = boards(port, 1)
    wait_until(lambda: len(hub.machines()) == 2, "both are here")
    former = hub.me.id
    hub.close(0)
    again = boards(port, 0)
    wait_until(lambda: len(again.machines()) == 2, "the other has connected again")
    wait_until(lambda: other.machines()[0].id == again.me.id, "and knows the new launcher")
    assert again.me.id != former


def test_strangers_and_nonsense_change_nothing(boards, wait_until) -> None:
    hub = boards(0, 0)
    with socket.create_connection(("127.0.0.1", hub.port)) as silent:
        with socket.create_connection(("127.0.0.1", hub.port)) as loud:
            loud.sendall(b"x" * 100)
        wrong = (b"{}[]", b"[1]", b'{"machine": {"rank": "1"}}', b'{"machine": 3}', b"\xff", b"[" * 100_000)
        for text in wrong:
            with run_token.connect(("127.0.0.1", hub.port), board.token_of_run(), 10) as known:
                known.sendall(text + b"\n")
                known.settimeout(10)
                while known.recv(4096):
                    pass
        assert silent.recv(10)
    other = boards(hub.port, 1)
    wait_until(lambda: len(hub.machines()) == len(other.machines()) == 2, "the machines meet all the same")


def test_two_machines_of_one_rank_are_refused(boards, wait_until, monkeypatch) -> None:
    hub = boards(0, 0, 3)
    first = boards(hub.port, 1, 3)
    wait_until(lambda: len(hub.machines()) == 2, "the first is here")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    second = boards(hub.port, 1, 3)
    wait_until(lambda: all(one.refusal is not None for one in (hub, first, second)), "all are told")
    assert "--machine_rank 1" in first.refusal.text and "elsewhere" in first.refusal.text


def test_the_address_and_the_interface_come_from_the_connection(boards, wait_until, monkeypatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    hub = boards(0, 0)
    other = boards(hub.port, 1)
    wait_until(lambda: bool(hub.own_address and other.own_address), "both know theirs")
    assert isinstance(hub, Hub) and isinstance(other, Member)
    assert hub.own_address == other.own_address == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name in dict((text, number) for number, text in socket.if_nameindex())
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert interface_variables("127.0.0.1") == {"NCCL_SOCKET_IFNAME": name}
    assert interface_variables("") == interface_variables("203.0.113.9") == {}


def test_a_record_reads_back() -> None:
    cause = Cause(KILLED, "why", 137, 2)
    machine = Machine(1, "id", "host", 8, facts={"a": "b"}, members={"0": "x"}, state=State.FAILED, cause=cause)
    assert Machine.read(machine.encode(with_facts=True)) == machine
    assert machine.named() == "machine rank 1 (host, ranks 8 to 15)"
    for wrong in (
        {},
        [],
        {**machine.encode(with_facts=True), "rank": "1"},
        {**machine.encode(with_facts=True), "state": "x"},
    ):
        with pytest.raises(ValueError, match="JSON object|is not|x"):
            Machine.read(wrong)
