"""Machines with given ranks: rendezvous, restarts and the common end, with real stores on loopback."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from accel_launch.elastic.agent import Agent
from accel_launch.elastic.meeting import ElasticJob
from accel_launch.elastic.static_rendezvous import StaticRendezvous
from accel_launch.elastic.tcp_store import ForkedStoreServer
from accel_launch.network.peers import Peers, Waiting
from accel_launch.network.records import KILLED, Cause, State
from accel_launch.supervisor import Child, SignalWatch
from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions


class Machines:
    """The rendezvous of machines at one port; concurrent calls run in threads."""

    def __init__(
        self, port: int, count: int, max_restarts: int = 3, timeout: float = 60, backend: str = "static"
    ) -> None:
        self.port, self.count, self.max_restarts, self.timeout = port, count, max_restarts, timeout
        self.backend = backend
        self.handlers = [self.make(rank) for rank in range(count)]

    def make(self, rank: int) -> StaticRendezvous:
        options = RendezvousOptions(
            machine_rank=rank,
            main_process_ip="127.0.0.1",
            main_process_port=self.port,
            rdzv_backend=self.backend,
            rdzv_conf=f"timeout={self.timeout}",
            max_restarts=self.max_restarts,
            machine_timeout=0.0,
        )
        return StaticRendezvous(ElasticJob("script.py", (), 1, self.count, options))

    def meet(self, ranks: list[int]) -> list[tuple[int, int, int]]:
        """Number of the round, rank and port of the processes' store, of each."""
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: self.handlers[rank].meet(), ranks))
        return [(self.handlers[rank].round, info.rank, info.port) for rank, info in zip(ranks, found, strict=True)]

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.leave()


@pytest.fixture
def machines(free_port):
    made: list[Machines] = []

    def make(count: int, **options: float) -> Machines:
        made.append(Machines(free_port(), count, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _assert_closed(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_each_round_has_its_own_store(machines) -> None:
    three = machines(3)
    met = three.meet([2, 0, 1])
    first = met[0][2]
    assert met == [(0, rank, first) for rank in (2, 0, 1)] and first != three.port
    assert not any(handler.is_awaited() for handler in three.handlers)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(three.handlers[1].meet)
        deadline = time.monotonic() + 60
        while not (three.handlers[0].is_awaited() and three.handlers[2].is_awaited()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not again.done()
        met = three.meet([0, 2])
        info = again.result(60)
    assert [number for number, _, _ in met] == [1, 1] and three.handlers[1].round == 1
    _assert_closed(first)
    ports = {port for _, _, port in met} | {info.port}
    assert len(ports) == 1 and not ports & {three.port, first}
    fresh = dist.TCPStore(
        "127.0.0.1", ports.pop(), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    fresh.set("rank", "here")
    assert fresh.get("rank") == b"here"
    assert not any(handler.is_awaited() for handler in three.handlers)


def test_failures_of_several_machines_at_once_are_one_restart(machines) -> None:
    three = machines(3, max_restarts=1)
    three.meet([0, 1, 2])
    assert {number for number, _, _ in three.meet([0, 1, 2])} == {1}
    with pytest.raises(RendezvousClosedError, match="which --max_restarts 1 does not allow"):
        three.handlers[2].meet()


def test_a_relaunched_launcher_takes_over_its_rank(machines) -> None:
    two = machines(2)
    two.meet([0, 1])
    former, two.handlers[1] = two.handlers[1], two.make(1)
    assert [number for number, _, _ in two.meet([1, 0])] == [1, 1]
    with pytest.raises(RendezvousStateError, match="--machine_rank 1"):
        former.meet()
    former.leave()


def test_a_relaunch_before_the_first_rendezvous_uses_no_restart(machines, wait_until) -> None:
    """Of two launchers with the same rank, one gets an error."""
    three = machines(3, max_restarts=0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(three.handlers[rank].meet) for rank in (0, 1)]
        # Machine rank 0 knows the first one, which the second one then replaces; not the reverse.
        wait_until(
            lambda: (board := three.handlers[0].board) is not None and 1 in board.machines(), "the first is here"
        )
        former, three.handlers[1] = three.handlers[1], three.make(1)
        waiting.append(pool.submit(three.handlers[1].meet))
        with pytest.raises(RendezvousStateError, match="--machine_rank 1"):
            waiting[1].result(60)
        assert three.handlers[2].meet().rank == 2
        assert [waiting[0].result(60).rank, waiting[2].result(60).rank] == [0, 1]
    assert [handler.round for handler in (*three.handlers, former)] == [0, 0, 0, 0]


def test_machines_without_given_ranks(machines, wait_until, capsys) -> None:
    """The first one at the main address has rank 0; a further one waits, and takes the place of one that is gone."""
    three = machines(3, backend="c10d", max_restarts=1)
    three.handlers = [three.make(0) for _ in range(4)]  # as in a file that all machines share
    main, *others = three.handlers
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(main.meet)
        wait_until(lambda: main.board is not None, "the first one listens")
        met = [one.result(60) for one in [pool.submit(other.meet) for other in others[:2]]]
        assert first.result(60).rank == 0 and {one.rank for one in met} == {1, 2}
        spare = pool.submit(others[2].meet)
        wait_until(lambda: others[2].board is not None and others[2].board.met, "the fourth one is connected")
        time.sleep(2.5)  # it asks once a second
        assert others[2].board.me.rank == -1 and not main.is_awaited()
        others[0].board._closing = True  # as if it were killed
        others[0].board._wake()
        wait_until(main.is_awaited, "the fourth one has its place")
        again = [one.result(60) for one in (pool.submit(main.meet), pool.submit(others[1].meet), spare)]
    assert [one.rank for one in again] == [0, met[1].rank, met[0].rank]
    assert [handler.round for handler in three.handlers if handler is not others[0]] == [1, 1, 1]


@pytest.mark.parametrize("forks", [False, True])
def test_rounds_of_a_single_machine_are_counted(machines, forks: bool) -> None:
    alone = machines(1)
    if forks:
        alone.handlers[0]._job = replace(alone.handlers[0]._job, entrypoint=print, start_method="fork")
    (first,), (second,) = alone.meet([0]), alone.meet([0])
    _assert_closed(first[2])
    assert first == (0, 0, alone.port) and second[:2] == (1, 0) and second[2] != alone.port
    assert not alone.handlers[0].is_awaited()
    alone.handlers[0].withdraw(Cause(KILLED, "ended", 1))  # nobody to tell
    _assert_closed(second[2])


def test_a_refusal_ends_the_wait_of_every_machine(machines, wait_until) -> None:
    three = machines(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(three.handlers[rank].meet) for rank in (0, 1)]
        wait_until(lambda: (board := three.handlers[0].board) is not None and 1 in board.machines(), "both are here")
        three.handlers[0].board.refuse("machine rank 2: no device")
        for one in waiting:
            with pytest.raises(ConfigurationError, match="machine rank 2: no device"):
                one.result(10)
    with pytest.raises(ConfigurationError, match="machine rank 2: no device"):
        three.handlers[2].meet()


def test_a_missing_machine_is_named(machines, monkeypatch, capsys) -> None:
    monkeypatch.setattr("accel_launch.network.peers.LEAST_SECONDS", 0.1)
    monkeypatch.setattr("accel_launch.network.peers.FIRST_NOTE_SECONDS", 0.1)
    three = machines(3, timeout=0.8)
    with pytest.raises(RendezvousTimeoutError, match=r"0\.8 s.*rank 1, machine rank 2"):
        three.meet([0])
    assert "waiting for machine rank 1, machine rank 2; here: 0 (" in capsys.readouterr().err
    many = machines(10, timeout=0.3)
    with pytest.raises(RendezvousTimeoutError, match=r"machine rank 8, 1 more; here: 0 \(\S+\)$"):
        many.meet([0])
    many = machines(9, timeout=0.3)
    with pytest.raises(RendezvousTimeoutError, match=r"machine rank 7, machine rank 8; here: 0 \(\S+\)$"):
        many.meet([0])
    with pytest.raises(RendezvousTimeoutError, match=r"the machine of rank 0 at 127\.0\.0\.1:\d+: \S+"):
        machines(2, timeout=0.3).meet([1])


def _gives_up(handler: StaticRendezvous) -> None:
    """Wait in vain for a machine, and withdraw, as the launcher does."""
    handler._timeout_seconds = 0.5
    with pytest.raises(RendezvousTimeoutError):
        handler.meet()
    handler.withdraw(Cause(KILLED, "no room on the disk", 3))
    assert handler.board is None


def _fails_to_meet(handler: StaticRendezvous) -> Exception:
    try:
        with pytest.raises((ConfigurationError, RendezvousClosedError)) as raised:
            handler.meet()
        return raised.value
    finally:
        handler.withdraw(Cause(KILLED, "as the others", 2))


@pytest.mark.parametrize("quits", [0, 1])
def test_a_machine_that_gives_up_before_the_first_round_ends_the_others(
    machines, wait_until, quits: int, monkeypatch
) -> None:
    """Those that wait already, and one that comes late."""
    three = machines(3)

    may_quit = threading.Event()

    class UntilTold(Waiting):
        """The wait of the machine that gives up: over when the others are here, and the test has seen it."""

        @property
        def is_over(self) -> bool:
            return self._limit == 0.5 and may_quit.is_set()

    monkeypatch.setattr("accel_launch.elastic.static_rendezvous.Waiting", UntilTold)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(_fails_to_meet, three.handlers[1 - quits])
        quitting = pool.submit(_gives_up, three.handlers[quits])
        wait_until(
            lambda: (hub := three.handlers[0].board) is not None and {0, 1} <= {*hub.machines()}, "both are here", 30
        )
        board = three.handlers[0].board
        may_quit.set()
        wait_until(lambda: board.refusal is not None, "the others are told", 30)
        errors = [_fails_to_meet(three.handlers[2]), waiting.result(30)]
        quitting.result(30)
    for error in errors:
        assert isinstance(error, ConfigurationError)
        assert re.fullmatch(rf"machine rank {quits} \(.*\): no room on the disk", str(error))


def test_a_machine_that_gives_up_in_a_later_round_has_failed(machines) -> None:
    two = machines(2)
    two.meet([0, 1])
    with ThreadPoolExecutor(1) as pool:
        quits = pool.submit(_gives_up, two.handlers[0])
        deadline = time.monotonic() + 60
        while two.handlers[1].board.machines()[0].state is not State.FAILED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        error = _fails_to_meet(two.handlers[1])
        quits.result(60)
    assert isinstance(error, RendezvousClosedError)
    assert "machine rank 0 failed and are not started again: no room on the disk" in str(error)


def test_a_machine_whose_processes_run_leaves_in_silence(machines) -> None:
    two = machines(2)
    two.meet([0, 1])
    other = two.handlers[0].board
    two.handlers[1].withdraw(Cause(KILLED, "not told", 3))
    time.sleep(0.5)
    assert other.machines()[1].state is State.RUNNING and other.machines()[1].cause is None


@pytest.mark.parametrize(("state", "message"), [(State.FAILED, "rank 1 failed"), (State.SUCCEEDED, "rank 1 ended")])
def test_a_machine_that_has_ended_closes_the_rendezvous(machines, wait_until, state, message) -> None:
    two = machines(2)
    two.meet([0, 1])
    Peers(two.handlers[1].board, 0, 2).post(state, Cause(KILLED, "rank 3 was ended by SIGKILL", 137))
    wait_until(lambda: two.handlers[0].board.machines()[1].state is state, "machine rank 0 has been told")
    with pytest.raises(RendezvousClosedError, match=f"{message}.*rank 3 was ended"):
        two.handlers[0].meet()


def test_a_machine_is_heard_of_while_its_ranks_are_started(machines, wait_until, monkeypatch, tmp_path) -> None:
    """Many ranks on a busy machine take longer to start than a silent machine is waited for."""
    two = machines(2)
    job = ElasticJob(sys.executable, ["-c", ""], 2, 2, RendezvousOptions(monitor_interval=0.05))
    agent = Agent(job, two.handlers[0], tmp_path, SignalWatch(False))
    start, told = Child.start, []

    def slowly(*args, **options) -> Child:
        told.append(f"address {len(told)}")
        two.handlers[0].board.post(address=told[-1])
        other = two.handlers[1].board
        wait_until(lambda: other.machines()[0].address == told[-1], "the other machine hears of this one", 30)
        return start(*args, **options)

    monkeypatch.setattr(Child, "start", slowly)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(two.handlers[1].meet)
        agent._meet()
        other.result(60)
        Peers(two.handlers[1].board, 0, 2).post(State.SUCCEEDED)
    agent._start()
    assert len(told) == 2 and [rank.process.wait(60) for rank in agent.ranks] == [0, 0]
    agent._stop()


@pytest.mark.parametrize("forks", [False, True])
def test_a_port_in_use_is_an_error(forks) -> None:
    job = ElasticJob(print, (), 1, 1, RendezvousOptions(), start_method="fork" if forks else "spawn")
    first = StaticRendezvous(job)
    port = first.meet().port
    try:
        with pytest.raises(RendezvousConnectionError, match=f"port {port}"):
            StaticRendezvous(job)._serve_ranks(port)
    finally:
        first.leave()


def test_a_forked_server_exits_with_its_parent() -> None:
    server = ForkedStoreServer("127.0.0.1", 0)
    client, other = (dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2))
    client.set("key", "value")
    assert other.get("key") == b"value"
    server.close()
    server.close()
    with pytest.raises(RuntimeError):
        client.get("key")


STEPS = """
    import os, pathlib, signal, sys, time
    rank, count, mode = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
    pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
    pathlib.Path(f"start{count}.{rank}").write_text(os.environ["MASTER_PORT"])
    starts = [pathlib.Path(f"start{count}.{other}") for other in range(int(os.environ["WORLD_SIZE"]))]
    while not all(start.exists() and start.read_text() for start in starts):  # existing is not enough: it may be empty
        time.sleep(0.02)
    if rank == int(sys.argv[2]) and (mode == "always" or count == 0):
        if mode == "late":
            # Their launcher takes the others' number away when it notices that they have ended; then it only has to say
            # so.
            for other in (0, 1):
                while pathlib.Path("/proc", pathlib.Path(f"pid{other}").read_text()).exists():
                    time.sleep(0.02)
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if count == 0 and mode != "late" or mode == "always":
        time.sleep(300)  # and notices nothing
"""


@pytest.fixture
def launch(shell, started, free_port):
    """Launch a script as several machines, two processes each; returns exit codes and stderr by machine."""

    def run(machines: int, restarts: int, *words: object) -> tuple[list[int], list[str]]:
        shell.write("s.py", STEPS)
        common = [
            f"--num_processes={2 * machines}",
            f"--num_machines={machines}",
            "--main_process_ip=127.0.0.1",
            "--monitor_interval=0.1",
        ]
        common += [f"--main_process_port={free_port()}", f"--max_restarts={restarts}"]
        launchers = [
            started(shell.fork("launch", "--cpu", *common, f"--machine_rank={rank}", "s.py", *map(str, words)))
            for rank in reversed(range(machines))
        ][::-1]
        errors = [launcher.communicate(timeout=110)[1] for launcher in launchers]
        return [launcher.returncode for launcher in launchers], errors

    return run


@pytest.mark.slow  # three machines start twice; rendezvous rounds have fast tests without ranks
def test_a_killed_rank_restarts_every_machine_once(shell, launch) -> None:
    codes, errors = launch(3, 1, "once", 0)
    assert codes == [0, 0, 0], errors
    assert all(text.count("starting all processes again (restart 1 of 1)") == 1 for text in errors), errors
    starts = {file: (shell.folder / file).read_text() for file in os.listdir(shell.folder) if file.startswith("start")}
    assert set(starts) == {f"start{count}.{rank}" for count in (0, 1) for rank in range(6)}
    first, second = ({text for file, text in starts.items() if file.startswith(f"start{count}.")} for count in (0, 1))
    assert len(first) == len(second) == 1 and first != second, (
        "the processes of a round meet at one port, which no former one uses"
    )


@pytest.mark.slow  # two machines start twice; rendezvous rounds have fast tests without ranks
@pytest.mark.parametrize("victim", [0, 3])
def test_all_machines_end_when_one_has_no_restarts_left(launch, victim: int) -> None:
    codes, errors = launch(2, 1, "always", victim)  # in less time than the other machine's processes sleep
    failed, other = victim // 2, 1 - victim // 2
    assert (
        codes[failed] == 128 + signal.SIGKILL
        and f"rank {victim} of 4 was ended by SIGKILL" in errors[failed].splitlines()[-1]
    )
    assert codes[other] == 128 + signal.SIGKILL
    reason, end = errors[other].splitlines()[-2:]
    assert f"rank {victim} of 4 was ended by SIGKILL" in reason and f"(machine rank {failed})" in reason
    assert end == "accel launch: the processes of this machine were ended."


@pytest.mark.slow  # two machines of two ranks; a rendezvous that closes has a fast test
def test_a_machine_whose_processes_have_exited_is_not_waited_for(launch) -> None:
    codes, errors = launch(2, 1, "late", 3)
    assert codes == [128 + signal.SIGKILL] * 2, errors
    assert re.fullmatch(r"accel launch: rank 3 of 4 was ended by SIGKILL .*", errors[1].splitlines()[-1])
    reason, end = errors[0].splitlines()[-2:]
    assert "rank 3 of 4 was ended by SIGKILL" in reason and "machine rank 1" in reason
    assert end == "accel launch: the processes of this machine succeeded."
