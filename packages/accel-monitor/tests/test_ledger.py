"""The ledger: every second has one cause, over kills, restarts, other sizes of the run, and damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from accel_monitor import make_ledger, read_runs
from accel_monitor.commands.goodput import COMMAND
from accel_monitor.ledger import Cause
from accel_monitor.parts import NAMES
from accel_state import ConfigurationError

STEP = {"data": 0.1, "forward": 0.5, "backward": 0.2, "waiting": 0.1, "optimizer": 0.05, "other": 0.05}


class Writer:
    """Writes the file of a rank as its processes would, with steps of one second: 0.5 s forward, 0.1 s data, ..."""

    def __init__(self, directory: Path, rank: int = 0, host: str = "a", world_size: int = 1) -> None:
        self.file = directory / "monitor" / f"rank-{rank:05d}.jsonl"
        self.file.parent.mkdir(exist_ok=True)
        self.rank, self.host, self.world_size = rank, host, world_size
        self.count = 0

    def write(self, **line: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"id": f"{self.rank}-{self.count}", **line}) + "\n")

    def start(self, process_start: float, startup: float, **more: Any) -> None:
        self.count += 1
        self.at, self.parts, self.step = 0.0, dict.fromkeys(NAMES, 0.0), 0
        self.write(kind="start", replica=None, rank=self.rank, world_size=self.world_size, device="cpu", step=0,
                   host=self.host, pid=1, time=process_start + startup, process_start=process_start,
                    **more)  # fmt: skip

    def spend(self, part: str, seconds: float) -> None:
        self.at += seconds
        self.parts[part] += seconds

    def load(self, step: int, seconds: float) -> None:
        self.spend("loading", seconds)
        self.write(kind="load", at=self.at, step=step, before=self.step)
        self.step = step

    def save(self, seconds: float) -> None:
        self.spend("saving", seconds)
        self.write(kind="save", at=self.at, seconds=seconds, step=self.step)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for part, seconds in STEP.items():
                self.spend(part, seconds)
            self.step += 1

    def sample(self, kind: str = "sample", **more: Any) -> None:
        self.write(kind=kind, at=self.at, parts=list(self.parts.values()), part="other", step=self.step,
                   step_at=self.at, samples=8 * self.step, tokens=0, **more)  # fmt: skip


def test_a_killed_run_adds_up_and_steps_are_computed_again(tmp_path: Path) -> None:
    rank = Writer(tmp_path)
    rank.start(1000.0, 4.0)
    rank.steps(10)
    rank.save(2.0)
    rank.sample()
    rank.steps(7)
    rank.sample()  # killed at 1000 + 4 + 19 = 1023
    rank.start(1030.0, 5.0)
    rank.load(10, 1.0)
    rank.steps(20)
    rank.sample("end", finished=True)  # 1030 + 5 + 1 + 20 = 1056
    ledger = make_ledger(read_runs(tmp_path)[0])
    seconds = ledger.seconds
    assert ledger.wall == pytest.approx(56) and ledger.total == pytest.approx(56)
    assert seconds[Cause.DEAD] == pytest.approx(7) and seconds[Cause.IMPORTS] == pytest.approx(9)
    assert seconds[Cause.SAVING] == pytest.approx(2) and seconds[Cause.LOADING] == pytest.approx(1)
    assert ledger.repeated_steps == 7 and seconds[Cause.AGAIN] == pytest.approx(7)
    assert seconds[Cause.PRODUCTIVE] == pytest.approx(0.75 * 30) and seconds[Cause.WAITING] == pytest.approx(3)
    assert ledger.goodput == pytest.approx(22.5 / 56) and ledger.failures == 1


def test_exits_of_ranks_and_launchers_have_causes(tmp_path: Path) -> None:
    """A rank is killed, ends, and is continued by another launcher; after that the ranks and the launcher exit."""
    rank = Writer(tmp_path)
    rank.start(1000.0, 1.0, launcher_start=997.0)
    rank.steps(9)
    rank.sample()  # killed at 1010, which its launcher sees at 1011 and exits at 1013
    rank.write(kind="exit", at=10.0)
    rank.write(kind="launcher", at=12.0)
    rank.start(1020.0, 1.0)
    rank.steps(19)
    rank.sample("end", finished=True)  # 1040
    rank.write(kind="exit", at=22.0)  # by the rank itself
    rank.write(kind="exit", at=23.0)  # by its launcher
    rank.write(kind="launcher", at=23.5)
    ledger = make_ledger(read_runs(tmp_path)[0])
    seconds = ledger.seconds
    assert seconds[Cause.DEAD] == pytest.approx(1 + 7) and seconds[Cause.LAUNCHER] == pytest.approx(2 + 0.5)
    assert seconds[Cause.LAUNCH] == pytest.approx(3) and seconds[Cause.IMPORTS] == pytest.approx(2)
    assert seconds[Cause.EXIT] == pytest.approx(4)
    assert ledger.wall == ledger.total == pytest.approx(47.5)


def test_repeated_steps_are_those_that_ran_more_than_once(tmp_path: Path) -> None:
    generator = random.Random(3)
    rank, executed, saved, clock = Writer(tmp_path), [], 0, 0.0
    for _ in range(40):
        rank.start(clock, 1.0)
        if saved:
            rank.load(saved, 0.5)
        for _ in range(generator.randrange(6)):
            count = generator.randrange(1, 5)
            executed += range(rank.step + 1, rank.step + 1 + count)
            rank.steps(count)
            if generator.random() < 0.3:
                saved = rank.step
                rank.save(0.2)
            if generator.random() < 0.2 and saved:
                rank.load(saved, 0.1)  # a script may go back without a restart
            rank.sample()
        clock += 1.0 + rank.at + generator.random()
    ledger = make_ledger(read_runs(tmp_path)[0])
    assert ledger.repeated_steps == len(executed) - len(set(executed)) > 20
    assert ledger.total == pytest.approx(ledger.wall)
    assert ledger.seconds[Cause.AGAIN] == pytest.approx(ledger.repeated_steps)


def test_ranks_that_leave_and_hosts_with_other_clocks(tmp_path: Path) -> None:
    for number, (host, clock) in enumerate([("a", 0.0), ("b", 300.0)]):
        rank = Writer(tmp_path, number, host, 2)
        rank.start(1000.0 + clock, 1.0)
        rank.steps(9)
        rank.sample()
    rank = Writer(tmp_path, 0, "a", 1)
    rank.count = 5
    rank.start(1020.0, 1.0)
    rank.steps(29)
    rank.sample("end", finished=True)
    (run,) = read_runs(tmp_path)
    ledger = make_ledger(run)
    assert ledger.total == pytest.approx(50 + 10)  # rank 1 is no part of the run after it left
    assert any("300 s" in note and "clocks" in note for note in run.notes)


def test_young(tmp_path: Path) -> None:
    rank, clock = Writer(tmp_path), 0.0
    for attempt in range(4):
        rank.start(clock, 1.0)
        for _ in range(10):
            rank.steps(10)
            rank.save(2.0)
        rank.sample(*(["end"] if attempt == 3 else []), **({"finished": True} if attempt == 3 else {}))
        clock += 1.0 + rank.at
    advice = make_ledger(read_runs(tmp_path)[0]).advice
    # Four attempts of 121 s, three of which failed: a failure each 161.3 s; sqrt(2 * 2 * 161.3) = 25.4 s between saves.
    assert advice.best_interval == pytest.approx((2 * 2 * 484 / 3) ** 0.5) and advice.interval == pytest.approx(10)
    assert (advice.steps, advice.best_steps) == (10, 25)
    assert advice.gain == pytest.approx(2 / 10 + 10 / (2 * 484 / 3) - (2 * 2 / (484 / 3)) ** 0.5)


def test_runs_in_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number in range(2):
        rank = Writer(tmp_path, number, world_size=2)
        rank.start(100.0, 1.0)
        rank.steps(3)
        rank.sample("end", finished=True)
        rank.start(200.0 + number, 1.0)
        rank.steps(5)
        rank.sample("end", finished=True)
    first, second = read_runs(tmp_path)
    assert [run.attempts[0, 0][0].last_step for run in (first, second)] == [3, 5]
    assert COMMAND.run([str(tmp_path)]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert COMMAND.run([str(tmp_path), "--run", "1"]) == 0
    with pytest.raises(ConfigurationError, match="--run 3"):
        COMMAND.run([str(tmp_path), "--run", "3"])
    Writer(tmp_path, 1).write(kind="start", replica=None, rank=1, world_size=2, device="cpu", step=0, host="a", pid=2,
                              time=30.0, process_start=30.0, id="other")  # fmt: skip
    Writer(tmp_path, 1).write(id="other", kind="sample", at=150.0, parts=[150.0, *[0.0] * 10], step=0)
    assert any("same time" in note for run in read_runs(tmp_path) for note in run.notes)


def test_another_launch_without_a_state_is_another_run(tmp_path: Path) -> None:
    """The first launch ended without end_training(), on two machines with launchers of their own."""
    for number, host in enumerate("ab"):
        rank = Writer(tmp_path, number, host, 2)
        for launch, begin in (("first", 100.0), ("second", 500.0)):
            rank.start(begin + number, 1.0, launch=f"{launch} on {host}")
            rank.steps(5)
            rank.sample("end", finished=False)
    first, second = read_runs(tmp_path)
    for run in (first, second):
        ledger = make_ledger(run)
        assert ledger.seconds[Cause.DEAD] == pytest.approx(1.0), "rank 0, whose host started a second earlier"
        assert ledger.seconds[Cause.BETWEEN] == 0 and ledger.total == pytest.approx(13)


def test_a_launcher_that_starts_its_ranks_again_continues_the_run(tmp_path: Path) -> None:
    """Before the first saved state: no state is loaded; the launcher of the other machine ran all the time."""
    for number, host in enumerate("ab"):
        rank = Writer(tmp_path, number, host, 2)
        rank.start(100.0, 1.0, launch=f"launcher of {host}")
        rank.steps(5)
        rank.sample()
        rank.start(120.0, 1.0, launch="launcher of a" if host == "a" else "a launcher in place of b")
        rank.steps(8)
        rank.sample("end", finished=True)
    (run,) = read_runs(tmp_path)
    ledger = make_ledger(run)
    assert ledger.seconds[Cause.DEAD] == pytest.approx(2 * 14) and ledger.seconds[Cause.BETWEEN] == 0
    assert ledger.repeated_steps == 5


def test_time_between_two_launches_of_a_run_is_not_dead(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rank = Writer(tmp_path)
    rank.start(100.0, 1.0, launch="evening")
    rank.steps(9)
    rank.save(1.0)
    rank.sample("end", finished=False)
    rank.start(1000.0, 1.0, launch="morning")
    rank.load(9, 1.0)
    rank.steps(7)
    rank.sample("end", finished=True)
    ledger = make_ledger(read_runs(tmp_path)[0])
    assert ledger.seconds[Cause.BETWEEN] == pytest.approx(1000 - 111) and ledger.seconds[Cause.DEAD] == 0
    assert ledger.total == pytest.approx(ledger.wall) == pytest.approx(909)
    target = tmp_path / "page.html"
    assert COMMAND.run([str(tmp_path), "--html", str(target)]) == 0
    assert "<title>between launches: 14 min 49 s</title>" in target.read_text() and "dead:" not in target.read_text()
    assert "between launches" in capsys.readouterr().out


def test_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rank = Writer(tmp_path, 0, world_size=3)
    rank.start(100.0, 1.0)
    for _ in range(4):
        rank.steps(2)
        rank.sample()
    whole = rank.file.read_bytes()
    for length in range(len(whole)):
        rank.file.write_bytes(whole[:length])
        try:
            (run,) = read_runs(tmp_path)
        except ConfigurationError:
            assert length < whole.index(b"\n")
            continue
        ledger = make_ledger(run)
        assert ledger.total == pytest.approx(ledger.wall)
        assert any("2 of 3 ranks" in note for note in run.notes)
    lines = whole.splitlines(keepends=True)
    rank.file.write_bytes(lines[0] + b"\x00\xff[]\n" + b'{"kind":"sample","at":1}\n' + lines[-1])
    assert COMMAND.run([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "2 line(s) could not be read" in output and "100.0%" in output


def test_directories_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        COMMAND.run([str(tmp_path)])
    with pytest.raises(ConfigurationError, match="missing"):
        COMMAND.run([str(tmp_path / "missing")])


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rank = Writer(tmp_path, host="<script>alert(1)</script>")
    rank.start(1000.0, 4.0)
    rank.steps(10)
    rank.save(2.0)
    rank.sample()
    rank.start(1050.0, 4.0)
    rank.load(10, 1.0)
    rank.sample("end", finished=True)
    rank.write(kind="broken")
    target = tmp_path / "page.html"
    assert COMMAND.run([str(tmp_path), "--html", str(target)]) == 0
    page = target.read_text()
    # 9 of 55 s; the timeline has the dead time as a rectangle of (50 - 16) / 55 of 1000.
    assert "Goodput 13.6%" in page and 'width="618.18"' in page and "http" not in page and "<script" not in page
    with pytest.raises(ConfigurationError, match="nowhere"):
        COMMAND.run([str(tmp_path), "--html", str(tmp_path / "nowhere" / "page.html")])
    (tmp_path / "link.html").symlink_to(target)
    with pytest.raises(ConfigurationError, match="link"):
        COMMAND.run([str(tmp_path), "--html", str(tmp_path / "link.html")])
