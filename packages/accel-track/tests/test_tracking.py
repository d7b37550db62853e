"""Delivery from the loop to the trackers: in order, complete, and without blocking."""

from __future__ import annotations

import argparse
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import ConfigurationError
from accel_state.testing import run_world
from accel_track import (
    Delivery,
    GeneralTracker,
    Silence,
    TrackerError,
    TrackerRun,
    read_run,
)

QUICK = Delivery(start_timeout=0.5, stall_timeout=0.5, finish_timeout=0.5)
PATIENCE = 100.0  # for what comes sooner or later, on however slow a machine


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the trackers logged; another library may have something to say meanwhile."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("accel_track")]


class Recorder(GeneralTracker):
    """Keeps what it is told, and fails or hangs where it is told to."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(
        self,
        run_name: str = "run",
        fail: str = "",
        hang: str = "",
        delay: float = 0.0,
        error: BaseException | None = None,
    ) -> None:
        super().__init__()
        self.run_name, self.fail, self.hang, self.delay = run_name, fail, hang, delay
        self.error = error or RuntimeError("the service is down")
        self.told: list[Any] = []
        self.threads: set[str] = set()
        self.entered, self.release = threading.Event(), threading.Event()

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def _do(self, what: str, *told: Any) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay)
        if what == self.hang:
            self.entered.set()
            self.release.wait(PATIENCE)
        if what == self.fail:
            raise self.error
        self.told.append((what, *told) if told else what)

    def start(self) -> None:
        self._do("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._do("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._do("log", values, step, kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._do("images", values, step)

    def log_table(
        self, table_name: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        self._do("table", table_name, columns, data, step)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        self._do("artifact", Path(local_path).read_text(), artifact_path)

    def finish(self) -> None:
        self._do("finish", self.failed)


class InTheLoop(Recorder):
    name = "in_the_loop"
    background = False


@pytest.mark.parametrize("kind", [Recorder, InTheLoop])
def test_everything_arrives_in_order(kind: type[Recorder], tmp_path: Path) -> None:
    tmp_path.joinpath("file.txt").write_text("kept")
    tracker = kind()
    with TrackerRun(tracker) as tracking:
        tracking.init_trackers("project", config={"lr": 0.1})
        loss = torch.tensor(0.0)
        for step in range(200):
            tracking.log({"loss": loss, "nested": {"x": step}}, step=step, log_kwargs={tracker.name: {"prefix": "a"}})
            loss += 1.0
        tracking.log_images({"image": [torch.zeros(1, 2, 2)]}, step=3)
        tracking.log_table("table", columns=["a"], data=[[1]], step=4)
        tracking.log_artifact(tmp_path / "file.txt", "folder")
        assert tracker.told[-1] == ("artifact", "kept", "folder")
    expected = [("log", {"loss": step, "nested": {"x": step}}, step, {"prefix": "a"}) for step in range(200)]
    assert tracker.told[:2] == ["start", ("config", {"lr": 0.1})]
    assert tracker.told[2:202] == expected
    assert [told[0] for told in tracker.told[202:]] == ["images", "table", "artifact", "finish"] and tracker.told[
        -1
    ] == ("finish", False)
    assert (threading.current_thread().name in tracker.threads) == (kind is InTheLoop) and len(tracker.threads) == 1


def test_the_loop_does_not_wait_for_a_slow_tracker() -> None:
    tracker = Recorder(hang="log")
    tracking = TrackerRun(tracker)
    tracking.init_trackers("project")
    for step in range(50):
        tracking.log({"loss": 1.0}, step=step)
    assert tracker.told == ["start"], "the loop is through before the first call is"
    tracker.release.set()
    tracking.finish()
    assert len([told for told in tracker.told if told[0] == "log"]) == 50


def test_a_full_queue_slows_the_loop_down_and_loses_nothing() -> None:
    tracker = Recorder(delay=0.005)
    tracking = TrackerRun(tracker, delivery=Delivery(queue_size=3))
    tracking.init_trackers("project")
    waiting = []
    for step in range(40):
        tracking.log({"loss": 1.0}, step=step)
        waiting.append(tracking._queues[0].pending)
    tracking.finish()
    assert max(waiting) <= 3
    assert [told[2] for told in tracker.told if told[0] == "log"] == list(range(40))


@pytest.mark.parametrize("fail", ["start", "config", "log", "images", "finish"])
@pytest.mark.parametrize("kind", [Recorder, InTheLoop])
def test_a_tracker_that_raises_is_set_aside_with_one_warning(
    kind: type[Recorder], fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = kind(fail=fail), Recorder()
    tracking = TrackerRun([broken, sound])
    tracking.init_trackers("project", config={"lr": 1})
    for step in range(5):
        tracking.log({"loss": 1.0}, step=step)
        tracking.log_images({"image": torch.zeros(1, 2, 2)}, step=step)
    if fail in ("start", "config"):
        assert isinstance(tracking.get_tracker(broken.name), Silence)
        tracking.get_tracker(broken.name).anything.at_all(1)
        assert tracking.trackers == [sound]
    tracking.finish()
    assert len([told for told in sound.told if told[0] == "log"]) == 5
    warnings = said(caplog)
    method = {"config": "store_init_configuration", "images": "log_images"}.get(fail, fail)
    assert len(warnings) == 1
    assert (
        f"The tracker '{broken.name}' failed in {method}() and is disabled: RuntimeError: the service is down"
        in warnings[0]
    )
    assert "The run continues." in warnings[0]
    if fail != "finish":
        assert broken.told[-1] == ("finish", False), "also one that was disabled lets go of what it holds"


def test_what_is_no_exception_of_the_usual_kind_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    tracking = TrackerRun(Recorder(fail="log", error=SystemExit(3)))
    tracking.init_trackers("project")
    tracking.log({"a": 1})
    tracking.finish()
    assert "SystemExit: 3" in caplog.text


@pytest.mark.parametrize("fail", ["start", "log", "finish"])
@pytest.mark.parametrize("kind", [Recorder, InTheLoop])
def test_strict_mode_raises(kind: type[Recorder], fail: str, caplog: pytest.LogCaptureFixture) -> None:
    tracking = TrackerRun(kind(fail=fail), strict=True)

    def run() -> None:
        tracking.init_trackers("project")
        tracking.log({"a": 1}, step=0)
        tracking.flush()
        tracking.finish()

    with pytest.raises(TrackerError, match=rf"failed in {fail}\(\).*RuntimeError: the service is down") as error:
        run()
    assert isinstance(error.value.__cause__, RuntimeError)
    tracking.finish()
    assert not said(caplog)


def test_a_constructor_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Unmakeable(Recorder):
        name = "unmakeable"

        def __init__(self, run_name: str) -> None:
            raise OSError("no place")

    tracking = TrackerRun([Unmakeable])
    tracking.init_trackers("project")
    tracking.log({"a": 1})
    assert isinstance(tracking.get_tracker("unmakeable"), Silence)
    tracking.finish()
    assert len(said(caplog)) == 1 and "could not be created and is disabled: OSError: no place" in caplog.text
    with pytest.raises(TrackerError, match="could not be created: no place"):
        TrackerRun([Unmakeable], strict=True).init_trackers("project")


@pytest.mark.parametrize("hang", ["start", "log", "finish"])
def test_a_tracker_that_hangs_is_waited_for_within_bounds(hang: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(hang=hang)
    # The thread gets all the time that it needs to come to the call that hangs.
    delivery = {
        "start": QUICK,
        "log": Delivery(stall_timeout=0.5, finish_timeout=0.5),
        "finish": Delivery(finish_timeout=0.5),
    }[hang]
    tracking = TrackerRun(tracker, delivery=delivery)
    tracking.init_trackers("project")
    for step in range(10):
        tracking.log({"a": 1}, step=step)
    assert hang == "finish" or tracker.entered.wait(PATIENCE)
    tracking.finish()
    assert not tracker.release.is_set(), "the end came before the call did"
    tracker.release.set()
    assert f"hangs in {hang}() and is disabled: TimeoutError: no progress for 0.5 s" in caplog.text
    assert ("has not started after 0.5 s" in caplog.text) == (hang == "start")
    lost = {"start": "calls lost: 10", "log": "calls lost: 9", "finish": "may be lost"}[hang]
    assert lost in caplog.text


def test_a_full_queue_of_a_tracker_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(hang="log")
    tracking = TrackerRun(tracker, delivery=Delivery(queue_size=4, stall_timeout=0.3, finish_timeout=0.3))
    tracking.init_trackers("project")
    for step in range(100):
        tracking.log({"a": 1}, step=step)
    assert len(said(caplog)) == 1 and "4 calls are queued, and there was no progress for 0.3 s" in caplog.text
    tracker.release.set()
    tracking.finish()


def test_a_slow_start_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(hang="start")
    tracking = TrackerRun(tracker, delivery=Delivery(start_timeout=0.2))
    tracking.init_trackers("project")
    tracking.log({"a": 1}, step=0)
    tracker.release.set()
    tracking.finish()
    assert tracker.told == ["start", ("log", {"a": 1}, 0, {}), ("finish", False)]
    assert "has not started after 0.2 s. The run continues, and up to 10000 calls are queued for it" in caplog.text


def test_a_strict_start_that_hangs_raises() -> None:
    tracker = Recorder(hang="start")
    tracking = TrackerRun(tracker, delivery=QUICK, strict=True)
    with pytest.raises(TrackerError, match=r"hangs in start\(\)"):
        tracking.init_trackers("project")
    tracker.release.set()
    tracking.finish()


def test_log_says_why_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracking = TrackerRun(Recorder())
    for _ in range(3):
        tracking.log({"a": 1})
    assert len(said(caplog)) == 1 and "before init_trackers() or after the end of the run" in caplog.text
    TrackerRun().log({"a": 1})
    assert len(said(caplog)) == 1


def test_methods_that_a_tracker_lacks_are_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Plain(GeneralTracker):
        name = "plain"
        requires_logging_directory = False
        tracker = None

    with TrackerRun(Plain()) as tracking:
        tracking.init_trackers("project")
        for _ in range(2):
            tracking.log_images({"a": torch.zeros(1, 2, 2)})
    assert said(caplog) == ["The tracker 'plain' does not support log_images()."]


def test_wrong_input_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with TrackerRun(Recorder()) as tracking:
        with pytest.raises(ConfigurationError, match=r"config=3.*int\."):
            tracking.init_trackers("project", config=3)
        tracking.init_trackers("project", config=argparse.Namespace(lr=1))
        with pytest.raises(ConfigurationError, match=r"log\(\) got 3 of type int"):
            tracking.log(3)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="file not found"):
            tracking.log_artifact(tmp_path / "missing")
        with pytest.raises(ConfigurationError, match="'other'"):
            tracking.get_tracker("other")
        tracking.log({"bad": _Spread()})
        assert "The values of log() are dropped: ConfigurationError" in caplog.text
    with TrackerRun(Recorder(), strict=True) as tracking:
        tracking.init_trackers("project")
        with pytest.raises(TrackerError, match="The values of bad could not be copied"):
            tracking.log({"bad": _Spread()})
    for name in ("queue_size", "start_timeout", "stall_timeout", "finish_timeout"):
        with pytest.raises(ConfigurationError, match=f"{name}=0 must be positive"):
            Delivery(**{name: 0})


class _Spread(torch.Tensor):
    placements = (type("Shard", (), {"is_replicate": lambda self: False})(),)


def test_a_second_run_ends_the_first() -> None:
    first = TrackerRun([Recorder])
    first.init_trackers("a")
    tracker = first.trackers[0]
    first.init_trackers("b")
    assert (
        tracker.told[-1] == ("finish", False) and first.trackers[0] is not tracker and first.trackers[0].run_name == "b"
    )
    first.finish()


def test_threads_end_with_the_run() -> None:
    before = set(threading.enumerate())
    tracking = TrackerRun([Recorder(), Recorder()])
    tracking.init_trackers("project")
    # Threads of other libraries may come and go meanwhile.
    started = [
        thread for thread in threading.enumerate() if thread not in before and thread.name == "accel_track recorder"
    ]
    assert len(started) == 2
    tracking.finish()
    for thread in started:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in started)


class EveryRank(Recorder):
    name = "every_rank"
    main_process_only = False


def once_a_job(folder: str) -> tuple[bool, str, list[str], int]:
    with TrackerRun("jsonl", folder) as tracking:
        tracking.init_trackers("project", {"lr": 1})
        tracking.log({"a": 1}, step=0)
        own = tracking.get_tracker("jsonl")
        own.log({"b": 2}, step=1)
        found = tracking.trackers != [], type(own).__name__, list(tracking.state_dict()["trackers"])
    with TrackerRun([EveryRank]) as tracking:
        tracking.init_trackers("project")
        tracking.log({"a": 1})
        told = tracking.get_tracker("every_rank", unwrap=True)
    return *found, len(told)


@pytest.mark.parametrize("state", [True, False])
def test_only_the_main_process_logs_unless_a_tracker_is_for_every_rank(state: bool, tmp_path: Path) -> None:
    results = run_world(once_a_job, 2, str(tmp_path), state=state)
    assert results == [(True, "JSONLinesTracker", ["jsonl"], 3), (False, "Silence", [], 3)]
    (folder,) = (tmp_path / "project").iterdir()
    assert [row.get("a", row.get("b")) for row in read_run(folder).rows] == [1, 2]


class Directory(GeneralTracker):
    """Expects its directory to exist, and its path as it was given."""

    name = "directory"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.path = logging_dir + f"/{run_name}.txt"

    @property
    def tracker(self) -> str:
        return self.path

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        Path(self.path).write_text(str(values))


def test_the_directory_of_a_tracker_is_made(tmp_path: Path) -> None:
    directory = str(tmp_path / "new" / "logs")
    run = TrackerRun(Directory, directory, strict=True)
    run.init_trackers("project")
    run.log({"a": 1})
    run.finish()
    assert Path(directory, "project.txt").read_text() == "{'a': 1}"


class Owner:
    """Uses a run, and is part of a cycle, as an Accelerator is."""

    def __init__(self, recorder: Recorder) -> None:
        self.own = self
        self.run = TrackerRun([recorder], owner=self)


def test_a_run_whose_owner_is_gone_ends_when_another_one_starts() -> None:
    """A search of parameters that does not end its trackers had a thread for each."""
    first, second, third = Recorder(), Recorder(), Recorder()
    dropped, kept = Owner(first), Owner(second)
    for owner in (dropped, kept):
        owner.run.init_trackers("sweep")
        owner.run.log({"loss": 1.0}, step=0)
    del owner, dropped
    with TrackerRun([third]) as run:
        run.init_trackers("sweep")
        assert "finish" in str(first.told[-1]) and "finish" not in str(second.told)
    kept.run.finish()


def test_the_thread_of_a_run_that_nobody_ends_leaves_with_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    before, owner, recorder = set(threading.enumerate()), Owner(Recorder()), Recorder()
    owner.run = tracking = TrackerRun([recorder], owner=owner)
    tracking.init_trackers("project")
    tracking.log({"a": 1}, step=0)
    (thread,) = {one for one in threading.enumerate() if one.name == "accel_track recorder"} - before
    thread.join(2.5)  # longer than an idle thread needs to notice
    assert thread.is_alive()
    del owner
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert recorder.told[-2][0] == "log" and recorder.told[-1] == ("finish", False)
    tracking.finish()
    assert [call for call, *_ in recorder.told].count("finish") == 1
    assert "no progress" not in caplog.text, "no thread is left for a second call"


def test_a_run_whose_tracker_the_script_has_outlives_its_owner() -> None:
    recorders = [Recorder(), Recorder()]
    owners = [Owner(recorder) for recorder in recorders]
    runs = [owner.run for owner in owners]
    for run in runs:
        run.init_trackers("project")
    runs[0].get_tracker("recorder")
    assert runs[1].trackers == [recorders[1]]
    owners.clear()
    gc.collect()
    time.sleep(2.5)  # longer than an idle thread needs to notice
    assert not any(("finish", False) in recorder.told for recorder in recorders)
    for run in runs:
        run.finish()
    assert [recorder.told[-1] for recorder in recorders] == [("finish", False)] * 2
