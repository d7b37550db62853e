"""Launchers of replicas on several machines: the way to the lighthouse, and what they say of each other."""

from __future__ import annotations

import signal
import socket

import pytest

from accel_launch.lighthouse import Lighthouse
from accel_launch.network import board, peers, replica_machines
from accel_launch.network.records import INTERRUPTED, LOST, Cause, State
from accel_launch.network.replica_machines import ReplicaMachines
from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.options import FaultToleranceOptions
from accel_state.tunnel import TunnelServer

TOKEN = run_token.make_token()


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    """The run has a token, and what is not its launcher is recognised sooner."""
    monkeypatch.setenv(run_token.VARIABLE, TOKEN)
    monkeypatch.setattr(board, "_UNKNOWN_SECONDS", 1.0)
    monkeypatch.setattr(board, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(board, "REPORT_SECONDS", 3.5)
    monkeypatch.setattr(peers, "LEAST_SECONDS", 0.3)
    monkeypatch.setattr(peers, "FIRST_NOTE_SECONDS", 0.3)


@pytest.fixture
def machines():
    """Make launchers of replicas, which leave at the end."""
    made = []

    def make(port: int, rank: int, *, facts=None, timeout: float = 30.0, short: bool = False) -> ReplicaMachines:
        made.append(
            ReplicaMachines(
                ("127.0.0.1", port),
                rank,
                2,
                facts=facts or {},
                give_up_seconds=4.0,
                timeout_seconds=timeout,
                is_short=lambda ranks: short and len(ranks) < 2,
                say=lambda text: said.append(f"{rank}: {text}"),
            )
        )
        return made[-1]

    said: list[str] = []
    make.said = said
    yield make
    for one in reversed(made):
        one._board.close(0)


def lighthouse_of(machines: ReplicaMachines) -> Lighthouse:
    """The lighthouse as the second machine sees it."""
    return Lighthouse(FaultToleranceOptions(), TOKEN, False, print, "127.0.0.1", machines, serves=False)


def heard(port: int, server: socket.socket) -> None:
    """Check that what is sent to a port arrives at a server."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"join")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(4) == b"join"


def test_the_way_to_the_lighthouse_of_another_machine_and_to_its_successor(machines, free_port, wait_until) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        tunnels = [TunnelServer("127.0.0.1", 0, server.getsockname()[1], TOKEN.encode()) for _ in range(2)]
        first = machines(port, 0)
        first.announce(tunnels[0].port)
        lighthouse = lighthouse_of(machines(port, 1))
        near = int(lighthouse.address.rpartition(":")[2])
        heard(near, server)
        first._board.close(0)
        tunnels[0].close()
        machines(port, 0).announce(tunnels[1].port)  # the launcher of machine rank 0 was started again
        wait_until(lambda: lighthouse._machines.lighthouse_port() == tunnels[1].port, "the other one knows")
        assert lighthouse.restart_if_ended() is None
        heard(near, server)
        lighthouse.close()
        tunnels[1].close()


def test_how_far_replicas_are_reaches_the_other_machine(machines, free_port, wait_until, monkeypatch) -> None:
    port = free_port()
    first, second = machines(port, 0), machines(port, 1)
    first.announce(1234)
    second.wait_for_lighthouse()
    second.share({"replica_1": "computes 7"})
    wait_until(lambda: first.elsewhere() == {"replica_1": "computes 7"}, "it arrives")
    assert second.elsewhere() == {}
    monkeypatch.setattr(replica_machines, "_SHARE_SECONDS", 1000.0)
    second.share({"replica_1": "computes 8"})
    assert second._board.me.reports == {"replica_1": "computes 7"}, "not more often than that"
    second._board.close(0)
    wait_until(lambda: first.elsewhere() == {}, "what a machine said that is silent counts no longer")


def test_another_token_is_named(machines, free_port, monkeypatch) -> None:
    port = free_port()
    machines(port, 0)
    monkeypatch.setenv(run_token.VARIABLE, "another token of another run")
    with pytest.raises(ConfigurationError, match="token") as caught:
        lighthouse_of(machines(port, 1))
    assert run_token.VARIABLE in str(caught.value) and "another token of" not in str(caught.value)


def test_a_missing_lighthouse_is_waited_for_in_words_and_given_up(machines, free_port) -> None:
    with pytest.raises(ConfigurationError, match="no lighthouse listens at 127.0.0.1:.*refused.*machine rank 0"):
        machines(free_port(), 1, timeout=1.0).wait_for_lighthouse()
    assert any("waiting for the machine of rank 0 at 127.0.0.1" in text for text in machines.said)


@pytest.mark.slow  # 7 s of silence; test_board.py cuts a machine off in a fast test
def test_a_machine_that_is_cut_off_waits_in_words_and_gives_up(machines, cable, wait_until) -> None:
    """The others continue without it; it ends when machine rank 0 has not been back for the time limit."""
    hub = machines(0, 0, short=True)
    hub.announce(1234)
    line = cable(hub._board.port)
    other = machines(line.port, 1, timeout=2.0)
    assert other.wait_for_lighthouse() == ("127.0.0.1", 1234)
    wait_until(lambda: 1 in hub._board.machines(), "both are here")
    assert [one.look() for one in (hub, other)] == [None, None]
    line.plugged.clear()
    ends: list[Cause | None] = [None]

    def has_ended() -> bool:
        assert hub.look() is None
        ends[0] = ends[0] or other.look()
        # Too few replicas for a step are left on machine rank 0.
        return ends[0] is not None and any("0: waiting for machine rank 1 (" in text for text in machines.said)

    wait_until(has_ended, "the other one ends, and machine rank 0 waits")
    assert ends[0].kind == LOST and ends[0].code == 1 and "machine rank 0" in ends[0].text
    told = "\n".join(machines.said)
    assert "1: waiting for machine rank 0 (" in told and "no heartbeat for" in told
    wait_until(lambda: not hub.look() and bool(hub._board.lost()), "machine rank 0 gives it up")
    line.plugged.set()
    wait_until(lambda: not (hub._board.lost() or other._board.lost()), "both are back")
    assert other.look() is None


def test_the_end_of_machine_rank_0_ends_all_and_that_of_another_does_not(machines, wait_until) -> None:
    hub = machines(0, 0)
    hub.announce(1234)
    other = machines(hub._board.port, 1)
    other.wait_for_lighthouse()
    other.post(State.FAILED, Cause(INTERRUPTED, "ended by SIGTERM on host1 (machine rank 1)", 143))
    machine = hub._board.machines
    wait_until(lambda: 1 in machine() and machine()[1].state is State.FAILED, "machine rank 0 knows")
    assert hub.look() is None and hub.look() is None
    assert (
        [text for text in machines.said if "SIGTERM" in text and text.startswith("0: machine rank 1")]
        == [text for text in machines.said if "SIGTERM" in text]
        != []
    )
    cause = Cause(INTERRUPTED, "ended by SIGINT on host0 (machine rank 0)", 130)
    hub.post(State.FAILED, cause)
    wait_until(lambda: other.look() == cause, "the other one is told")


def test_a_machine_that_disagrees_is_not_let_in_while_the_others_train(machines, wait_until, capfd) -> None:
    hub = machines(0, 0, facts={"must num_replicas": "2"})
    hub.announce(1234)
    other = machines(hub._board.port, 1, facts={"must num_replicas": "4"})
    with pytest.raises(ConfigurationError, match="disagree"):
        other.wait_for_lighthouse()
        wait_until(lambda: other.look() is not None, "it is told")
    assert "num_replicas  2" in capfd.readouterr().err and hub.look() is None


ASKS = """
import os, pathlib, time, urllib.request
with urllib.request.urlopen(os.environ["TORCHFT_LIGHTHOUSE"], timeout=60) as answer:
    text = answer.read().decode()
part = pathlib.Path("part" + os.environ["ACCELERATE_FT_REPLICA"])
part.write_text(text)
part.rename("page" + os.environ["ACCELERATE_FT_REPLICA"])
while not pathlib.Path("end").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def launched(shell, started, free_port, wait_until):
    """Two machines whose replicas have read the lighthouse's page; their launchers."""
    pytest.importorskip("torchft")
    shell.write("s.py", ASKS)
    words = ["launch", "--cpu", "--ft", "--num_replicas=2", "--num_machines=2", "--main_process_ip=127.0.0.1"]
    words += [f"--main_process_port={free_port()}", "--machine_timeout=4", "--rdzv_conf=timeout=8"]
    token = {run_token.VARIABLE: TOKEN}
    launchers = [started(shell.start(*words, f"--machine_rank={rank}", "s.py", **token)) for rank in (0, 1)]

    def have_read() -> bool:
        ended = [one.communicate(timeout=60) for one in launchers if one.poll() is not None]
        assert not ended, ended
        return all((shell.folder / f"page{number}").exists() for number in (0, 1))

    wait_until(have_read, "both replicas have reached the lighthouse")
    return launchers


def test_replicas_of_both_machines_reach_one_lighthouse_and_end(shell, launched) -> None:
    pages = [(shell.folder / f"page{number}").read_text() for number in (0, 1)]
    assert all("lighthouse" in page.lower() for page in pages)
    shell.write("end", "")
    outputs = [one.communicate(timeout=100) for one in launched]
    assert [one.returncode for one in launched] == [0, 0], outputs


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        # Waits for two time limits; a machine that is cut off has a fast test.
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_lighthouses_machine_ends_the_others_with_its_name(launched, number: int, code: int) -> None:
    first, second = launched
    first.send_signal(number)
    _, error = second.communicate(timeout=100)
    assert second.returncode == code, error
    if number == signal.SIGINT:
        assert f"ended by SIGINT on {socket.gethostname()} (machine rank 0)" in error
        return
    named = f"machine rank 0 ({socket.gethostname()}, 127.0.0.1)"
    assert f"{named} is lost: it has sent no heartbeat for" in error and f"waiting for {named}" in error
