"""A range of machines: who takes part in a start, who waits, and what counts as a restart; real launchers' boards on
loopback. With ranks that train, on hosts of a network: tests/test_machines_come_and_go.py.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from accel_launch.elastic import short_lives
from accel_launch.elastic.meeting import ElasticJob, Meeting, RunEnded
from accel_launch.elastic.ranged_rendezvous import RangedRendezvous, check_last_call
from accel_launch.network.peers import Peers
from accel_launch.network.records import INTERRUPTED, KILLED, Cause, State
from accel_state.errors import ConfigurationError
from accel_state.options import RendezvousOptions
from accel_state.options.resources import MachineRange

LAST_CALL = 1.0
LEAVES = Cause(INTERRUPTED, "ended by SIGTERM on host1", 128 + signal.SIGTERM)


class Range:
    """Launchers of a range of machines at one port, whose calls run in threads."""

    def __init__(
        self, port: int, most: int = 3, restarts: int = 0, timeout: float = 60.0, last_call: float = LAST_CALL
    ) -> None:
        machines = MachineRange(most, 2)
        options = RendezvousOptions(
            main_process_ip="127.0.0.1",
            main_process_port=port,
            rdzv_conf=f"timeout={timeout},last_call_timeout={last_call}",
            max_restarts=restarts,
        )
        self.job = ElasticJob("script.py", (), 1, machines, options)
        self.made: list[RangedRendezvous] = []
        self.machine_timeout = 4.0

    def make(self, processes: int = 1, **facts: str) -> RangedRendezvous:
        options = replace(self.job.rendezvous, machine_timeout=self.machine_timeout)
        facts = facts or {"must script": "s.py"}
        job = replace(self.job, local_processes=processes, facts=facts, rendezvous=options)
        self.made.append(RangedRendezvous(job))
        return self.made[-1]

    def meet(self, *machines: RangedRendezvous) -> list[Meeting]:
        return [one.result(60) for one in [self.begin(machine) for machine in machines]]

    def begin(self, machine: RangedRendezvous) -> Future[Meeting]:
        return in_thread(machine.meet)

    def close(self) -> None:
        for one in reversed(self.made):
            if one.board is not None:
                one.board.close(0)


def in_thread(function: Callable[..., Any], *arguments: object) -> Future[Any]:
    """Call a function in a thread that does not outlive the tests if it hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def ranges(free_port):
    made: list[Range] = []

    def make(**options) -> Range:
        made.append(Range(free_port(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def places(meetings: list[Meeting]) -> list[tuple[int, int]]:
    return [(one.rank, len(one.sizes)) for one in meetings]


def started(machines: Range, count: int) -> list[RangedRendezvous]:
    """Machines that have started; the first one listens at the main address."""
    made = [machines.make() for _ in range(count)]
    first = machines.begin(made[0])
    deadline = time.monotonic() + 30
    while made[0].board is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    meetings = [first.result(60) for first in [first, *map(machines.begin, made[1:])]]
    assert sorted(places(meetings)) == [(rank, count) for rank in range(count)] and meetings[0].rank == 0
    return made


def leave(machine: RangedRendezvous) -> None:
    assert machine.board is not None
    Peers(machine.board, machine.round, 2).post(State.LEFT, LEAVES)
    machine.leave()


def test_it_begins_with_the_least_and_takes_in_one_that_joins(ranges, wait_until, capsys) -> None:
    """Ranks of those that stay are as before, and machines may have different numbers of processes."""
    machines = ranges(most=4)
    main = machines.make(2)
    waiting = machines.begin(main)
    wait_until(lambda: main.board is not None, "the first one listens")
    second = machines.make(1)
    assert places([machines.begin(second).result(60), waiting.result(60)]) == [(1, 2), (0, 2)]
    third = machines.make(3)
    joining = machines.begin(third)
    said = "this machine has arrived while the run trains; it takes part once the run has saved its state"
    wait_until(lambda: said in capsys.readouterr().err, "it says what it waits for")
    wait_until(main.is_awaited, "the main machine calls the others")
    assert not second.is_awaited() and main.may_save() and not joining.done()
    again = machines.begin(main)
    wait_until(second.is_awaited, "the second one is called")
    met = [again.result(60) if one is again else one.result(60) for one in (again, machines.begin(second), joining)]
    assert places(met) == [(0, 3), (1, 3), (2, 3)]
    assert {tuple(one.sizes) for one in met} == {(2, 1, 3)} and {one.restarts for one in met} == {0}
    assert len({one.port for one in met}) == 1 and not any(one.is_failure for one in met)
    assert re.search(r"has joined: starting 6 processes on 3 machines", met[0].news)


def test_of_two_that_start_on_one_machine_one_listens(ranges, monkeypatch) -> None:
    """Each found the port free; the one that is slower connects to the other."""
    monkeypatch.setattr("accel_launch.elastic.meeting.is_free", lambda *_: True)
    machines = ranges()
    assert sorted(places(machines.meet(machines.make(), machines.make()))) == [(0, 2), (1, 2)]
    machines.job = replace(machines.job, serves=True)
    with pytest.raises(ConfigurationError, match="cannot listen there"):
        machines.make().meet()


def test_two_that_join_at_once_are_taken_in_together(ranges, wait_until) -> None:
    machines = ranges(most=4)
    main, second = started(machines, 2)
    joining = [machines.begin(machines.make())]
    time.sleep(LAST_CALL / 2)
    joining.append(machines.begin(machines.make()))
    assert not main.is_awaited()
    wait_until(main.is_awaited, "the last call is over")
    met = [*machines.meet(main, second), *(one.result(60) for one in joining)]
    assert places(met) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_one_machine_more_stands_by_and_replaces_one_that_leaves(ranges, wait_until, capsys) -> None:
    machines = ranges(most=2)
    main, second = started(machines, 2)
    spare = machines.begin(machines.make())
    wait_until(lambda: "this machine stands by: 2 machines train" in capsys.readouterr().err, "it says so")
    time.sleep(LAST_CALL + 0.2)
    assert not main.is_awaited() and not spare.done()
    leave(second)
    wait_until(main.is_awaited, "the main machine sees that one leaves")
    assert main.may_save()
    (meeting,) = machines.meet(main)
    assert places([meeting, spare.result(60)]) == [(0, 2), (1, 2)] and meeting.restarts == 0
    assert "has left (ended by SIGTERM); machine" in meeting.news


def test_a_spare_ends_with_the_run(ranges, wait_until, capsys) -> None:
    machines = ranges(most=2)
    main, second = started(machines, 2)
    spare = machines.begin(machines.make())
    wait_until(lambda: "this machine stands by" in capsys.readouterr().err, "it waits")
    for one in (main, second):
        assert one.board is not None
        one.board.post(state=State.SUCCEEDED)
    with pytest.raises(RunEnded, match="the run has ended, without this machine"):
        spare.result(60)


def test_failures_count_and_machines_that_are_gone_do_not(ranges, wait_until) -> None:
    machines = ranges(restarts=1, last_call=60)  # a start waits for all three, however slow they are
    machines.machine_timeout = 100.0  # a closed connection is enough
    main, second, third = started(machines, 3)
    for one in (main, second, third):
        assert one.board is not None
    Peers(third.board, 0, 3).post(State.WAITING, Cause(KILLED, "rank 2 was killed", 137, third.round))
    wait_until(main.is_awaited, "the main machine sees the failure")
    assert not main.may_save()  # its ranks hang in a collective with the rank that failed
    met = machines.meet(main, second, third)
    assert {one.restarts for one in met} == {1} and all(one.is_failure for one in met)
    assert "a process failed (restart 1 of 1): starting" in met[0].news
    # Without a word, as if it were killed: its connection is closed, and it does not come back.
    third.board.close(0)
    wait_until(lambda: bool(main.board.lost()), "it is declared lost", 30)
    met = machines.meet(main, second)
    assert places(met) == [(0, 2), (1, 2)] and {one.restarts for one in met} == {1}
    assert "is gone: starting 2 processes on 2 machines" in met[0].news
    other = machines.begin(second)
    with pytest.raises(RendezvousClosedError, match="--max_restarts 1 does not allow"):
        main.meet()
    in_thread(main.withdraw, Cause(KILLED, "rank 0 was killed", 137))
    with pytest.raises(RendezvousClosedError, match=r"the run has ended: rank 0 was killed"):
        other.result(60)


def test_too_few_machines_are_waited_for_and_then_it_is_an_error(ranges, wait_until) -> None:
    machines = ranges()
    main, second = started(machines, 2)
    main._timeout_seconds = 0.5
    machines.job = replace(machines.job, rendezvous=replace(machines.job.rendezvous, rdzv_conf="timeout=0.5"))
    leave(second)
    wait_until(main.is_awaited, "the main machine sees that one leaves")
    with pytest.raises(RendezvousTimeoutError, match=r"not within 0.5 s: waited for at least 2 machines .*; here: \w+"):
        main.meet()
    late = machines.make()
    main.withdraw(Cause(KILLED, "not within 0.5 s", 2))
    with pytest.raises(RendezvousTimeoutError, match="not within 0.5 s: waited for"):
        late.meet()


def test_the_main_machine_is_waited_for_and_continues_the_count(ranges, wait_until) -> None:
    machines = ranges(restarts=2, last_call=60)  # a start waits for all three, however slow they are
    main, second, third = started(machines, 3)
    machines.meet(main, second, third)
    leave(main)
    wait_until(lambda: second.is_awaited() and third.is_awaited(), "the others hear of it")
    waiting = [machines.begin(one) for one in (second, third)]
    time.sleep(1)
    assert not any(one.done() for one in waiting)
    (meeting,) = machines.meet(machines.make())
    met = [meeting, *(one.result(60) for one in waiting)]
    assert sorted(places(met)) == [(0, 3), (1, 3), (2, 3)] and places(met)[0] == (0, 3)
    assert {one.restarts for one in met} == {1}  # that of the restart without a machine that came or left
    assert met[1].news.startswith("machine rank 0 (") and ") was started again: starting 3" in met[1].news


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_at_the_main_machine_ends_the_run(ranges, wait_until, number) -> None:
    machines = ranges()
    main, second = started(machines, 2)
    assert second.may_leave(number) and main.may_leave(number) is (number == signal.SIGTERM)
    assert not main.may_leave(0)
    in_thread(main.withdraw, Cause(INTERRUPTED, "ended", 128 + number))
    wanted = State.FAILED if number == signal.SIGINT else State.LEFT
    wait_until(lambda: second.board.machines()[0].state is wanted, "the other one is told")


def test_a_machine_that_has_ended_is_not_started_again(ranges, wait_until) -> None:
    machines = ranges(restarts=3)
    main, second = started(machines, 2)
    assert second.board is not None
    second.board.post(state=State.SUCCEEDED)
    wait_until(lambda: main.board.machines()[second.board.me.rank].state is State.SUCCEEDED, "it is told")
    assert not main.is_awaited()
    late = machines.begin(machines.make())
    time.sleep(LAST_CALL + 0.2)
    assert not main.is_awaited()  # the run is about to end: nobody joins
    with pytest.raises(RendezvousClosedError, match="have ended and are not restarted"):
        main.meet()
    in_thread(main.withdraw, Cause(KILLED, "rank 0 was killed", 137))
    with pytest.raises(RendezvousClosedError, match="rank 0 was killed"):
        late.result(60)


def test_only_the_machine_that_disagrees_is_kept_out(ranges, wait_until, capsys) -> None:
    machines = ranges()
    main, _ = started(machines, 2)
    with pytest.raises(ConfigurationError, match="the machines disagree"):
        machines.make(**{"must script": "other.py"}).meet()
    time.sleep(LAST_CALL + 0.2)
    assert not main.is_awaited()
    assert "other.py" in capsys.readouterr().err


@pytest.mark.slow  # 8 s of silence; a machine that is gone has a fast test here, and a cut one in test_board.py
def test_a_machine_that_was_cut_off_is_forgotten_and_joins_again(ranges, wait_until, cable) -> None:
    machines = ranges(most=3)
    main, second = started(machines, 2)
    line = cable(machines.job.rendezvous.main_process_port)
    third = machines.make()
    third._port, third._job = line.port, replace(third._job, serves=False)
    joining = machines.begin(third)

    def take_in(joining: Future[Meeting]) -> list[Meeting]:
        """On a busy machine the one behind the cable may be silent for seconds, and miss a start."""
        met: list[Meeting] = []
        while not joining.done():
            wait_until(lambda: joining.done() or main.is_awaited(), "the main machine calls the others")
            if not joining.done():
                met = machines.meet(main, second)
        return [*met, joining.result()]

    take_in(joining)
    line.plugged.clear()
    wait_until(lambda: bool(main.board.lost() and third.board.lost()), "both sides give it up", 30)
    assert places(machines.meet(main, second)) == [(0, 2), (1, 2)]
    wait_until(lambda: len(second.board.machines()) == 2, "the others forget it", 30)
    again = machines.begin(third)
    line.plugged.set()
    met = take_in(again)
    assert places(met) == [(0, 3), (1, 3), (2, 3)] and met[0].restarts == 0


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_last_call_is_a_number_of_seconds(text) -> None:
    assert check_last_call("0") == 0
    with pytest.raises(ConfigurationError, match=f"last_call_timeout={text} must be a number of seconds"):
        check_last_call(text)


@pytest.mark.slow  # five starts, 14 s of waiting; short lives and lost machines have fast tests
def test_a_machine_that_joins_and_dies_is_held_for_a_while(ranges, wait_until, capsys, monkeypatch) -> None:
    """Each of its lives costs all processes a restart. The others go on without it, and it is told why."""
    monkeypatch.setattr(short_lives, "SHORT_LIVES", 2)
    monkeypatch.setattr(short_lives, "HOLD_SECONDS", 60.0)
    machines = ranges(most=3)
    machines.machine_timeout = 100.0  # a closed connection is enough
    main, second, dying = started(machines, 3)
    for _ in range(2):
        assert dying.board is not None and main.board is not None
        dying.board.close(0)
        wait_until(lambda: bool(main.board.lost()), "its end is noticed", 30)
        assert sorted(places(machines.meet(main, second))) == [(0, 2), (1, 2)]
        held = "has joined and died 2 times within 60 s" in capsys.readouterr().err
        dying = machines.make()
        joining = machines.begin(dying)
        if not held:
            wait_until(main.is_awaited, "it is taken in again")
            assert len([one.result(60) for one in (machines.begin(main), machines.begin(second), joining)]) == 3
    told = "It is not taken in for"
    wait_until(lambda: not main.is_awaited() and told in capsys.readouterr().err, "it waits, and is told why")
    assert held
    monkeypatch.setattr(short_lives, "HOLD_SECONDS", 0.0)
    wait_until(main.is_awaited, "it may join again")


def test_only_short_lives_that_did_not_end_on_a_signal_count(monkeypatch) -> None:
    lives = short_lives.ShortLives()
    for number in range(5):
        lives.begin(f"a{number}")
        assert not lives.end(f"a{number}", "machine host1", left=True)
    monkeypatch.setattr(short_lives, "SHORT_SECONDS", -1.0)
    for number in range(5):
        lives.begin(f"b{number}")
        assert not lives.end(f"b{number}", "machine host1", left=False)
    monkeypatch.undo()
    said = []
    for number in range(3):
        lives.begin(f"c{number}")
        said.append(lives.end(f"c{number}", "machine host1", left=False))
        assert not lives.end(f"c{number}", "machine host1", left=False), "it ends once"
    assert said[:2] == ["", ""] and "machine host1 has joined and died 3 times within 600 s" in said[2]
    assert not lives.reason("machine host2")
