"""Checkpoints on the disk and their copies in a store: an S3 server, that also fails, is slow, and loses its client."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import client, keys, s3_server, uploads

from accel_checkpoint import (
    AsyncSaver,
    CheckpointError,
    Uploader,
    list_checkpoints,
    load,
    newest,
    save,
    save_process,
    uploading,
)
from accel_checkpoint.manifest import MANIFEST_NAME
from accel_state.errors import ConfigurationError
from accel_state.storage.store import Store
from accel_state.storage.url import RemotePath


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{request.node.name}"


def saved(folder: Path, number: int, elements: int = 1000) -> Path:
    path = folder / f"checkpoint_{number}"
    save({"weights": torch.full((elements,), float(number)), "number": number}, path, step=number)
    return path


def names(where: Any) -> list[str]:
    return [info.path.name for info in list_checkpoints(where) if info.complete]


def test_copies_are_equal_and_old_ones_deleted(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes them: the one that trains does not upload."""

    def refuse(*_: Any) -> None:
        raise AssertionError("in this process")

    monkeypatch.setattr(Store, "upload", refuse)
    with Uploader(place, keep=2) as uploader:
        for number in range(3):
            path = saved(tmp_path, number)
            assert uploader.upload(path) == RemotePath(f"{place}/checkpoint_{number}")
            uploader.wait()
            assert not uploader.in_flight and not uploader.needed
        before = keys(place.removeprefix("s3://bucket/"))
        uploader.upload(path)  # it is there already
    uploader.close()
    assert keys(place.removeprefix("s3://bucket/")) == before
    assert names(place) == ["checkpoint_1", "checkpoint_2"]
    found = load(f"{place}/checkpoint_2")
    assert found["number"] == 2 and found["weights"].eq(2).all()
    assert newest(tmp_path, place) == path  # both have it


# Uploads checkpoints of so many elements, waits for all but the last, and ends.
SCRIPT = """
import sys, torch
from accel_checkpoint import Uploader, save
uploader = Uploader(sys.argv[2], keep=2)
for number, size in enumerate(map(int, sys.argv[3:])):
    uploader.wait()
    path = save({"weights": torch.arange(size), "number": number}, f"{sys.argv[1]}/checkpoint_{number}", step=number)
    if number == len(sys.argv) - 4:
        print("saved", flush=True)
    uploader.upload(path)
"""


def started(folder: Path, place: str, *sizes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), place, *map(str, sizes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    return process


@pytest.mark.slow  # 24 MB, three processes; what a killed upload leaves is in test_remote.py
def test_a_process_that_is_killed_while_it_uploads(tmp_path: Path, place: str) -> None:
    process = started(tmp_path, place, 1000, 6_000_000)
    prefix = place.removeprefix("s3://bucket/") + "/checkpoint_1/"
    begun = time.monotonic()
    while not keys(prefix) and not uploads():
        assert time.monotonic() < begun + 60
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The copy does not exist, and the checkpoint does.
    assert names(place) == ["checkpoint_0"] and newest(tmp_path, place) == tmp_path / "checkpoint_1"
    assert newest(tmp_path / "lost", place) == RemotePath(f"{place}/checkpoint_0")
    time.sleep(0.5)  # the process that uploads sees within 50 ms that its parent is gone
    with Uploader(place) as uploader:
        uploader.upload(tmp_path / "checkpoint_1")
    uploader.close()
    found, expected = load(f"{place}/checkpoint_1"), load(tmp_path / "checkpoint_1")
    assert torch.equal(found["weights"], expected["weights"]) and not uploads()
    assert len({key.split("/")[0] for key in keys(prefix)}) == 2  # one set of files, and the marker


def test_the_interpreter_waits_at_its_end(tmp_path: Path, place: str) -> None:
    assert started(tmp_path, place, 1000).wait(60) == 0
    assert names(place) == ["checkpoint_0"]


def test_a_save_into_a_store_is_sent_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    save_process.saves.stop()  # one that another test has started does not have the variables of the server
    monkeypatch.setattr(save_process, "MIN_BYTES", 0)
    saver = AsyncSaver()
    saver.save({"value": torch.arange(9)}, "s3://bucket/run/state")
    saver.wait()
    assert torch.equal(load("s3://bucket/run/state")["value"], torch.arange(9))
    assert save_process.saves.started
    for key in keys("run/state/"):  # the other process made these, which are not in a store of this one
        assert key == MANIFEST_NAME or key.startswith("data-")
    save_process.saves.stop()


def test_a_run_that_went_on_elsewhere(tmp_path: Path, place: str) -> None:
    """The later one counts, not the one with the higher number, which only this machine has."""
    saved(tmp_path, 7)
    saved(tmp_path, 8)
    elsewhere = save({"number": 7}, f"{place}/checkpoint_7", step=7)
    assert newest(tmp_path, place) == elsewhere
    assert newest(tmp_path) == tmp_path / "checkpoint_8"
    assert newest(tmp_path / "nothing", f"{place}/nothing") is None


def test_a_store_that_fails(tmp_path: Path, server: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path, 1)
    uploader = Uploader("s3://nobucket/run")
    uploader.upload(path)
    with pytest.raises(CheckpointError, match="s3://nobucket/run/checkpoint_1") as raised:
        uploader.wait()
    assert "could not be uploaded" in caplog.text and load(path)["number"] == 1
    assert server["AWS_SECRET_ACCESS_KEY"] not in caplog.text + str(raised.value), "no secret is told"
    assert client().list_buckets()["Buckets"]
    uploader.wait()  # told once
    uploader.upload(tmp_path / "checkpoint_9")
    with pytest.raises(CheckpointError, match="not complete: it lacks its manifest"):
        uploader.close()


def test_uploads_that_take_longer_than_the_time_between_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, copied = threading.Event(), []

    def copy(path: Path, target: RemotePath, keep: int | None) -> None:
        assert goes_on.wait(60) and path.is_dir()
        copied.append(path.name)

    monkeypatch.setattr(uploading, "copy_checkpoint", copy)
    uploader = Uploader("memory://slow", keep=2)
    try:
        for number in range(5):
            path = saved(tmp_path, number)
            uploader.upload(path, keep_here=1)
            while len(uploader.needed) < min(number + 1, 3):
                time.sleep(0.01)
        assert {path.name for path in uploader.needed} == {"checkpoint_0", "checkpoint_3", "checkpoint_4"}
    finally:
        goes_on.set()
        uploader.close()
    # What waits is not deleted; afterwards one is kept.
    assert copied == ["checkpoint_0", "checkpoint_3", "checkpoint_4"] and names(tmp_path) == ["checkpoint_4"]
    assert [name for name in ("checkpoint_1", "checkpoint_2") if f"{name} is not uploaded" in caplog.text] == [
        "checkpoint_1",
        "checkpoint_2",
    ]


@pytest.mark.parametrize(("url", "keep", "message"), [("runs", None, "URL of a store"), ("s3://b/x", 0, "keep=0")])
def test_what_cannot_be_used(url: str, keep: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Uploader(url, keep)
