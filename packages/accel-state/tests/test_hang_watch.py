"""Hang watches of two threads that stand for ranks; the real ones are in accel's test_hang_reports.py."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from accel_state import hang_files
from accel_state.hang_reports import Activity, HangWatch, activity_of, report_text
from accel_state.options.core import CoreOptions

SECONDS = 0.3


def in_module(name: str, code: str) -> dict[str, Any]:
    """The names of a module of torch or accel."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(code, f"{name}.py", "exec"), names)
    return names


BARRIER = in_module("torch.distributed.fake", "def barrier(end):\n    end.lock.acquire()")["barrier"]
SAVE = in_module("accel.fake", "def save_state(function):\n    function()")["save_state"]
LOAD = in_module("accel_data.fake", "def __next__(function):\n    function()")["__next__"]


class End(threading.Event):
    """An event, with a lock that native code can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()


class Rank:
    """A thread that a watch watches, until the test ends."""

    def __init__(self, rank: int, store: HashStore, function: Callable[[End], None]) -> None:
        self.end, self._store, self._rank = End(), store, rank
        self.watch: HangWatch | None = None
        self._thread = threading.Thread(target=self._run, args=(function,))
        self._thread.start()

    def _run(self, function: Callable[[End], None]) -> None:
        self.watch = HangWatch(self._rank, 2, SECONDS, self._store)
        self.watch._thread.start()
        function(self.end)
        self.watch._end.set()
        self.watch._thread.join()

    def join(self) -> None:
        self.end.set()
        self.end.lock.release()
        self._thread.join()


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Run two ranks until they have a report, and return it."""
    ranks: list[Rank] = []

    def both(*functions: Callable[[End], None]) -> str:
        store = HashStore()
        ranks.extend(Rank(rank, store, function) for rank, function in enumerate(functions))
        store.wait(["report/1"])
        text, _ = json.loads(store.get("report/1"))
        return str(text)

    yield both
    for rank in ranks:
        rank.join()


def saves(end: End) -> None:
    SAVE(lambda: BARRIER(end))


def waits(end: End) -> None:
    BARRIER(end)


def computes(end: End) -> None:
    end.wait()


def test_a_rank_that_waits_names_those_that_have_not_arrived(run: Callable[..., str], capsys: Any) -> None:
    text = run(saves, waits)
    assert "rank 0: in <lambda>" not in text
    assert text.count("waits for rank 1") == text.count("waits for rank 0") == 1, text
    assert re.search(r"  rank 1: in barrier for \d+ s", text) and "in waits; waits for rank 0" in text
    assert "The ranks wait in different calls" in text


def test_a_rank_that_computes_is_not_said_to_wait(run: Callable[..., str]) -> None:
    text = run(computes, waits)
    assert "  rank 0: in threading.wait for" in text and "in computes\n" in text, text
    assert "  rank 1: in barrier for" in text and "The ranks wait" not in text


def test_the_launcher_gets_it_if_it_prints(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert hang_files.path() is None  # torchrun's
    monkeypatch.setenv(hang_files.PRINTER_VARIABLE, str(tmp_path / "error.json"))
    text = run(waits, computes)
    found = None
    while found is None:
        found = hang_files.read(tmp_path)
    assert found[0] == text and capfd.readouterr().err == ""


def frame_in(function: Callable[..., Any], *arguments: Any) -> Activity:
    """The activity of a thread that calls a function, which reads it in its innermost frame."""
    found: list[Activity] = []
    function(*arguments, lambda: found.append(activity_of(sys._getframe(1), 61)))
    return found[0]


def test_user_code_is_named_with_the_call_that_it_is_part_of() -> None:
    inner = in_module("accel.fake", "def probe(read):\n    read()")["probe"]

    def hook(read: Callable[[], None]) -> None:
        inner(read)

    direct = frame_in(inner)
    assert direct.call == "probe" and direct.place.endswith("in frame_in") and not direct.waits
    nested: list[Activity] = []

    def dataset() -> None:
        nested.append(activity_of(sys._getframe()))

    LOAD(dataset)
    SAVE(dataset)
    assert [one.call for one in nested] == ["user code of a data loader", "user code of save_state"]
    assert all(one.place.endswith("in dataset") for one in nested)


def test_a_line_that_waits_for_the_device_counts_as_waiting() -> None:
    class Loss:
        def item(self) -> Activity:
            return Activity("", "", False)

    found: list[Activity] = []

    def read(loss: Loss) -> None:
        found.extend([activity_of(sys._getframe()), loss.item()][:1])  # on the line of the call
        found.append(activity_of(sys._getframe()))

    read(Loss())
    assert [one.waits for one in found] == [True, False]


def test_a_later_call_of_a_line_is_another_one() -> None:
    watch, moved = HangWatch(0, 2, 60, HashStore()), []

    def look() -> bool:
        return watch._has_moved(sys._getframe(1))

    def call() -> None:
        for _ in range(3):
            moved.append(look())  # at one instruction

    for _ in range(3):
        call()
    assert moved == [True, False, False] * 3


def test_ranks_that_do_the_same_share_a_line() -> None:
    late = Activity("user code", "s.py:3 in main", False, "", 70.0)
    wait = Activity("gather", "s.py:9 in main", True, "all_gather", 60.4)
    text = report_text(2, {0: wait, 1: wait, 2: wait, 3: late, 5: wait, 4: "no answer"}, 60)
    assert text.splitlines() == [
        "rank 2 of 6 has been in gather for 60 s (--hang_report_seconds 60). What every rank is doing:",
        "  ranks 0-2, 5: in gather (all_gather) for 60 s, at s.py:9 in main; waits for ranks 3-4",
        "  rank 3: in user code for 70 s, at s.py:3 in main",
        "  rank 4: no answer",
    ]
    assert "every rank is here" in report_text(0, {0: wait, 1: wait}, 60)


def test_a_single_process_and_0_have_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CoreOptions.read("hang_report_seconds") == 60
    HangWatch.start(0, 1)
    assert HangWatch._running is None
    monkeypatch.setenv("ACCELERATE_HANG_REPORT_SECONDS", "0")
    HangWatch.start(0, 2)
    assert HangWatch._running is None
