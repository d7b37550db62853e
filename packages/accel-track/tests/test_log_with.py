"""Allowed values of log_with."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint

import pytest

from accel_state import ConfigurationError, MissingDependencyError
from accel_state.registry import Registry
from accel_track import (
    TRACKERS,
    GeneralTracker,
    JSONLinesTracker,
    LoggerType,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
    log_with,
    on_main_process,
    register_tracker_class,
)
from accel_track.base import Silence


class Mine(GeneralTracker):
    name = "jsonl"
    requires_logging_directory = False
    tracker = None


def test_names_enums_classes_and_objects() -> None:
    mine = Mine()
    assert filter_trackers(None) == []
    assert filter_trackers("jsonl", "runs") == filter_trackers([LoggerType.JSONL], "runs") == [JSONLinesTracker]
    assert filter_trackers(("jsonl", "jsonl", LoggerType.JSONL), "runs") == [JSONLinesTracker]
    assert filter_trackers(JSONLinesTracker, "runs") == [JSONLinesTracker]
    assert filter_trackers(mine) == [mine]
    assert filter_trackers(["jsonl", mine], "runs") == [mine], "an object wins over the class of its name"


@pytest.mark.parametrize("word", ["all", LoggerType.ALL])
def test_all_is_every_tracker_that_is_installed(word: str) -> None:
    mine = Mine()
    chosen = [tracker.name for tracker in filter_trackers([word], "runs")]
    assert chosen == get_available_trackers() and chosen[0] == "jsonl"
    assert filter_trackers([word, mine], "runs")[-1] is mine
    assert [tracker.name for tracker in filter_trackers([mine, word], "runs")].count("jsonl") == 1


def test_all_without_a_directory_leaves_out_trackers_that_need_one(caplog: pytest.LogCaptureFixture) -> None:
    """Programs pass log_with="all" and no directory; those that start no tracker must run."""
    chosen = {tracker.name for tracker in filter_trackers("all")}
    assert chosen == {name for name in get_available_trackers() if not TRACKERS.load(name).requires_logging_directory}
    (record,) = caplog.records
    assert "leaves out jsonl" in record.getMessage() and "project_dir=..." in record.getMessage()
    with pytest.raises(ConfigurationError, match="'jsonl' needs a logging directory"):
        filter_trackers(["all", "jsonl"])  # what is named is never left out


def test_what_is_no_tracker_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'wandbb' .* Did you mean 'wandb'\?.*accel\.trackers"):
        filter_trackers("wandbb")
    with pytest.raises(ConfigurationError, match="log_with=3"):
        filter_trackers([3])
    with pytest.raises(ConfigurationError, match=r"'jsonl'.*directory\..*project_dir"):
        filter_trackers("jsonl")
    with pytest.raises(ConfigurationError, match=r"requires_logging_directory, tracker\."):

        class Nothing(GeneralTracker):
            pass

        Nothing()


def test_a_library_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoardTracker, "is_available", classmethod(lambda cls: False))
    assert "tensorboard" not in get_available_trackers()
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-track\[tensorboard\]'"):
        filter_trackers("tensorboard", "runs")
    # None in sys.modules is how Python marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "wandb", None)
    from accel_track import WandBTracker

    with pytest.raises(MissingDependencyError, match=r"'wandb'.*wandb.*accel-track\[wandb\]"):
        WandBTracker("run").start()


def test_other_packages_register_theirs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        EntryPoint("theirs", "accel_track.trackers.jsonl:JSONLinesTracker", "accel.trackers"),
        EntryPoint("broken", "no_such_package:Tracker", "accel.trackers"),
    ]
    monkeypatch.setattr(
        "accel_state.registry.installed_entry_points",
        lambda group: entries if group == "accel.trackers" else [],
    )
    monkeypatch.setattr(
        log_with,
        "TRACKERS",
        Registry("tracker", {"jsonl": TRACKERS.target("jsonl")}, "accel.trackers"),
    )
    monkeypatch.setattr(log_with, "_registered", {})
    assert get_available_trackers() == ["jsonl", "theirs"]
    assert filter_trackers("theirs", "runs") == [JSONLinesTracker]
    assert "The tracker 'broken' cannot be loaded and is skipped: ModuleNotFoundError" in caplog.text
    with pytest.raises(ModuleNotFoundError):
        filter_trackers("broken")


def test_registering_a_class(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log_with, "_registered", {})

    class Own(Mine):
        name = "own"

    class Other(Mine):
        name = "own"

    register_tracker_class(Own)
    assert filter_trackers("own") == [Own] and get_available_trackers()[-1] == "own"
    register_tracker_class(Own)
    assert not caplog.text
    # A notebook's cell that defines a class and registers it may run twice.
    register_tracker_class(Other)
    assert filter_trackers("own") == [Other] and "The tracker 'own' is replaced by" in caplog.text
    register_tracker_class(Mine)
    assert filter_trackers("jsonl") == [Mine] and get_available_trackers().count("jsonl") == 1
    assert "The tracker 'jsonl' is replaced by Mine" in caplog.text

    class All(Mine):
        name = "all"

    with pytest.raises(ConfigurationError, match="is 'all', which selects every tracker"):
        register_tracker_class(All)
    with pytest.raises(ConfigurationError, match="is not a subclass of GeneralTracker"):
        register_tracker_class(object)  # type: ignore[arg-type]


def test_the_base_class_does_nothing() -> None:
    blank = GeneralTracker(_blank=True)
    assert blank.start() is blank.store_init_configuration({}) is blank.log({}) is blank.finish() is None
    assert blank.run_id is None and GeneralTracker.is_available()
    with pytest.raises(ConfigurationError, match="cannot continue the run 'x'"):
        Mine().resume("x")
    assert Silence("a").name == "a" and Silence().tracker.any.thing(1) is None
    with pytest.raises(AttributeError):
        Silence().__iter__  # noqa: B018


def test_on_main_process_passes_results_on() -> None:
    class Counting(Mine):
        @on_main_process
        def add(self, a: int, b: int = 1) -> int:
            """Add."""
            return a + b

    assert Counting().add(1, b=2) == 3 and Counting.add.__doc__ == "Add."


def test_every_registered_tracker_keeps_to_the_conventions() -> None:
    for name in LoggerType.list()[1:]:
        tracker = TRACKERS.load(name)
        assert issubclass(tracker, GeneralTracker) and tracker.name == name and tracker.main_process_only
        assert tracker.requires_logging_directory == (name in ("jsonl", "tensorboard", "aim"))
    assert logging.getLogger("accel_track").handlers == []
