"""The jsonl tracker and its reader."""

from __future__ import annotations

import json
import math
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import ConfigurationError
from accel_state.errors import ArgumentTypeError
from accel_state.paths import LinkError
from accel_track import JSONLinesTracker, TrackerRun, find_runs, read_run
from accel_track.images import as_images, write_png

np = pytest.importorskip("numpy")


def log_some(folder: Path, **values: object) -> Path:
    with TrackerRun("jsonl", folder) as tracking:
        tracking.init_trackers("project")
        tracking.log(values, step=0)
        return tracking.get_tracker("jsonl", unwrap=True)


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    values = {
        "number": 1.5,
        "tensor": torch.tensor(2, dtype=torch.int32),
        "vector": torch.tensor([1.0, 2.0]),
        "nan": math.nan,
        "inf": torch.tensor(-math.inf),
        "text": "grün\n",
        "none": None,
        "flag": True,
        "nested": {"a": {"b": np.float32(0.5)}},
        "surrogate": "\ud800",
    }
    run = read_run(log_some(tmp_path, **values))
    (row,) = run.rows
    assert row["_step"] == 0 and abs(row["_time"] - run.folder.stat().st_mtime) < 60
    expected = {
        "number": 1.5,
        "tensor": 2,
        "vector": [1.0, 2.0],
        "nan": "NaN",
        "inf": "-Infinity",
        "text": "grün\n",
        "none": None,
    }
    expected |= {"flag": True, "nested/a/b": 0.5, "surrogate": "\ud800"}
    assert {name: row[name] for name in expected} == expected
    series = run.series()
    assert (
        math.isnan(series["nan"][0][1])
        and series["inf"] == [(0.0, -math.inf)]
        and set(series) == {*("number", "tensor", "nan", "inf", "nested/a/b")}
    )


def test_a_resumed_run_replaces_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = TrackerRun("jsonl", tmp_path)
    first.init_trackers("project", {"lr": 1})
    for step in range(10):
        first.log({"loss": step}, step=step)
        if step == 5:
            state = json.loads(json.dumps(first.state_dict()))
    first.finish()
    second = TrackerRun("jsonl", tmp_path)
    second.load_state_dict(state)
    second.init_trackers("project", {"lr": 2})
    assert second.state_dict()["trackers"]["jsonl"]["run_id"] == state["trackers"]["jsonl"]["run_id"]
    for step in range(6, 8):
        second.log({"loss": 100 + step}, step=step)
    second.finish()
    (run,) = find_runs(tmp_path)
    assert [found.folder for found in find_runs(str(tmp_path))] == [run.folder]
    assert [found.folder for found in find_runs([str(tmp_path), tmp_path], run.name)] == [run.folder]
    assert read_run(str(run.folder)).rows == run.rows
    with pytest.raises(ConfigurationError, match="missing"):
        find_runs("missing")
    for wrong in (3, None, [3]):
        with pytest.raises(ArgumentTypeError, match="3|None"):
            find_runs(wrong)
    assert run.series()["loss"] == [*((s, s) for s in range(6)), (6, 106), (7, 107)]
    assert run.facts["config"] == {"lr": 2}
    with (run.folder / "metrics.csv").open() as file:
        assert len(file.readlines()) == 9


@pytest.mark.parametrize("logged", [False, True])
def test_a_state_that_is_loaded_late_switches_to_its_run(logged: bool, tmp_path: Path) -> None:
    first = TrackerRun("jsonl", tmp_path)
    first.init_trackers("project", {"lr": 1})
    first.log({"loss": 1}, step=0)
    state = first.state_dict()
    first.finish()
    second = TrackerRun("jsonl", tmp_path)
    second.init_trackers("project", {"lr": 2})
    if logged:
        second.log({"loss": 5}, step=0)
    second.load_state_dict(state)
    second.log({"loss": 2}, step=1)
    second.load_state_dict(state)
    second.finish()
    runs = find_runs(tmp_path)
    assert len(runs) == 1 + logged, "a run without values is deleted"
    (resumed,) = (run for run in runs if run.facts["run_id"] == state["trackers"]["jsonl"]["run_id"])
    assert resumed.series()["loss"] == [(0, 1), (1, 2)] and resumed.facts["config"] == {"lr": 2}


def test_a_further_run_is_a_new_one(tmp_path: Path) -> None:
    tracking = TrackerRun("jsonl", tmp_path)
    tracking.load_state_dict({"trackers": {"jsonl": {"run_id": "earlier", "step": 3}}})
    ids = []
    for _ in range(2):
        tracking.init_trackers("project")
        ids.append(tracking.state_dict()["trackers"]["jsonl"]["run_id"])
    tracking.finish()
    assert ids[0] == "earlier" != ids[1]


def test_a_tracker_that_fails_keeps_its_run_in_the_state(tmp_path: Path) -> None:
    tmp_path.joinpath("project").write_text("in the way")
    tracking = TrackerRun("jsonl", tmp_path)
    state = {"trackers": {"jsonl": {"run_id": "earlier", "step": 3}}}
    tracking.load_state_dict(state)
    tracking.init_trackers("project")
    assert tracking.state_dict()["trackers"]["jsonl"]["run_id"] == "earlier"
    tracking.finish()


def test_a_cut_line_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = log_some(tmp_path, loss=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"_step": 1, "lo')
    tracker = JSONLinesTracker("project", tmp_path, run_id=folder.name)
    tracker.start()
    tracker.log({"loss": 3}, step=2)
    tracker.finish()
    run = read_run(folder)
    assert run.damaged == 1 and run.series()["loss"] == [(0, 1), (2, 3)]
    (folder / "metrics.jsonl").write_text("3\n")
    assert read_run(folder).damaged == 1


def test_files_stay_inside_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'\.\./x'"):
        JSONLinesTracker("../x", tmp_path)
    tracker = JSONLinesTracker("a/b", tmp_path)
    with pytest.raises(ConfigurationError, match="has no directory yet"):
        tracker.tracker  # noqa: B018
    with pytest.raises(ConfigurationError, match="is not open"):
        tracker.log({"a": 1})
    tracker.start()
    with pytest.raises(ConfigurationError, match=r"\.\./\.\./\.\./x"):
        tracker.log_images({"../../../x": torch.zeros(1, 2, 2)})
    tracker.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("run_id", ["../x", "/tmp/x", "a/b", "", ".", "..", "a\0b", 3])
def test_a_checkpoint_cannot_lead_a_run_elsewhere(tmp_path: Path, run_id: Any) -> None:
    tracker = JSONLinesTracker("project", tmp_path)
    for name_a_run in (tracker.resume, partial(JSONLinesTracker, "project", tmp_path)):
        with pytest.raises(ConfigurationError, match="run_id="):
            name_a_run(run_id)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json.partial", "metrics.csv.partial", "images", "tables"])
def test_nothing_is_written_through_links(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    if "." in name:
        precious.write_text("mine")
    else:
        precious.mkdir()
    folder = tmp_path / "logs" / "project" / "run"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(precious)
    tracker = JSONLinesTracker("project", tmp_path / "logs", run_id="run")
    with pytest.raises(LinkError, match=name):
        tracker.start()
        tracker.log({"loss": 1.0}, step=0)
        tracker.log_table("t", ["a"], [[1]])
        tracker.log_images({"i": torch.zeros(1, 2, 2)})
        tracker.finish()
    assert precious.read_text() == "mine" if "." in name else list(precious.iterdir()) == []


def test_a_discarded_run_is_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    tracker = JSONLinesTracker("project", tmp_path, run_id="run")
    tracker.start()
    tracker.tracker.rename(tmp_path / "moved")
    tracker.tracker.symlink_to(precious)
    with pytest.raises(LinkError, match="run"):
        tracker.discard()
    assert (precious / "file").is_file()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match="directory not found"):
        find_runs(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="contains no run"):
        find_runs(tmp_path)
    folder = log_some(tmp_path, loss=1)
    with pytest.raises(ConfigurationError, match=r"other\..*project/"):
        find_runs(tmp_path, ["other"])
    for damaged in ("{", "[]", "[" * 100_000):
        (folder / "run.json").write_text(damaged)
        with pytest.raises(ConfigurationError, match=r"run\.json is damaged"):
            read_run(folder)


def read_png(path: Path) -> np.ndarray:
    """The pixels of a file written by write_png."""
    data = path.read_bytes()
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    channels = {0: 1, 2: 3, 6: 4}[data[25]]
    length = int.from_bytes(data[33:37], "big")
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_written_as_they_are(channels: int, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    write_png(image, tmp_path / "a.png")
    assert (read_png(tmp_path / "a.png") == image).all()
    pillow = pytest.importorskip("PIL.Image")
    with pillow.open(tmp_path / "a.png") as opened:
        assert (np.asarray(opened).reshape(image.shape) == image).all()
        assert (as_images(opened)[0] == image).all()


def test_images_of_every_form() -> None:
    channels_first = torch.rand(2, 3, 4, 5)
    expected = (channels_first.permute(0, 2, 3, 1).double() * 255).round().to(torch.uint8).numpy()
    for value in (
        channels_first,
        list(channels_first),
        channels_first.numpy(),
        channels_first.permute(0, 2, 3, 1).numpy(),
    ):
        assert all((one == other).all() for one, other in zip(as_images(value), expected, strict=True))
    assert as_images(torch.tensor([[True, False]]))[0].tolist() == [[[255], [0]]]
    assert as_images(torch.tensor([[math.nan, 2.0, -1.0]], dtype=torch.bfloat16))[0].tolist() == [[[0], [255], [0]]]
    assert as_images(np.array([[300, -5]]))[0].tolist() == [[[255], [0]]]
    for wrong, words in (
        (torch.zeros(2), "cannot have shape"),
        (torch.zeros(5, 6, 7), "no dimension of 1, 3 or 4"),
        ("x", "cannot have"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            as_images(wrong)


def test_secrets_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api_key", "hush0123", "--lr", "0.5"])
    run = TrackerRun("jsonl", logging_dir=tmp_path)
    config = {"lr": 0.5, "hub_token": "hush0123", "eos_token": "</s>", "nested": {"password": "hush0123", "size": 3}}
    run.init_trackers("project", config=config)
    run.finish()
    (file,) = tmp_path.rglob("run.json")
    assert "hush0123" not in file.read_text() and config["hub_token"] == "hush0123"
    facts = read_run(file.parent).facts
    assert facts["command"][-2:] == ["--lr", "0.5"] and facts["config"]["nested"] == {"password": "(hidden)", "size": 3}
    assert facts["config"]["eos_token"] == "</s>"
