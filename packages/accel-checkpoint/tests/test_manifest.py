"""Manifests: their format stays, and what differs from one is found in the block where it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import xxhash

from accel_checkpoint.checkpoint_reader import CheckpointReader
from accel_checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    damaged_files,
    expected_digests,
    record_file,
    worker_threads,
)
from accel_checkpoint.names import CheckpointError
from accel_state import PartialState

EMPTY = "99aa06d3014798d86001c324468d497f"

# What accel-checkpoint 1.0.0 writes. Later versions have to read it, byte for byte: the last digest covers the rest.
STORED = """{
 "format": 1,
 "world_size": 2,
 "counters": {
  "iteration": 3
 },
 "versions": {
  "accel-checkpoint": "1.0.0"
 },
 "saved_at": "2026-01-02T03:04:05.000006+00:00",
 "files": {
  "notes/empty": {
   "size": 0,
   "digests": [
    "99aa06d3014798d86001c324468d497f"
   ]
  }
 },
 "digest": "xxh3_128",
 "block_bytes": 16777216,
 "own_digest": "39b2e6384678b4af78cba349e221249c"
}
"""


def test_a_stored_manifest_stays_readable() -> None:
    manifest = Manifest.parse(STORED.encode("ascii"), "here")
    assert manifest.files == {"notes/empty": FileRecord(0, (EMPTY,))} and manifest.counters == {"iteration": 3}
    assert manifest.prefix == "" and manifest.text() == STORED


def test_a_manifest_of_an_object_store_has_a_prefix() -> None:
    manifest = Manifest(1, 1, {"iteration": 0}, {}, "now", {}, prefix="data/7")
    again = Manifest.parse(manifest.text().encode("ascii"), "here")
    assert again == manifest and again.prefix == "data/7"


def test_a_changed_number_is_damage() -> None:
    changed = STORED.replace('"iteration": 3', '"iteration": 4')
    with pytest.raises(CheckpointError, match="here is damaged: its digest does not match"):
        Manifest.parse(changed.encode("ascii"), "here")


def test_the_number_of_the_next_checkpoint_is_needed() -> None:
    with pytest.raises(CheckpointError, match="damaged: KeyError: 'iteration'"):
        Manifest.parse(STORED.replace("iteration", "step").encode("ascii"), "here")


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME} is damaged: IsADirectoryError"):
        Manifest.read(tmp_path)


def _of_two_blocks(directory: Path) -> tuple[Path, Manifest]:
    content = bytes(range(256)) * (BLOCK_BYTES // 256) + b"the second block"
    (directory / "large").write_bytes(content)
    parts = [xxhash.xxh3_128(part).hexdigest() for part in (content[:BLOCK_BYTES], content[BLOCK_BYTES:])]
    record = record_file(directory / "large")
    assert record == FileRecord(len(content), tuple(parts))
    return directory / "large", Manifest(1, 1, {"iteration": 0}, {}, "now", {"large": record})


def test_the_damaged_block_of_a_large_file_is_named(tmp_path: Path) -> None:
    path, manifest = _of_two_blocks(tmp_path)

    (tmp_path / MANIFEST_NAME).write_text(manifest.text())

    def check(share: tuple[int, int] = (0, 1)) -> None:
        with CheckpointReader(tmp_path, PartialState(), share=share).verifying():
            pass

    check()
    with open(path, "r+b") as file:
        file.seek(BLOCK_BYTES + 3)
        file.write(b"X")
    with pytest.raises(CheckpointError, match=rf"large is damaged: .*after byte {BLOCK_BYTES}\. Choose"):
        check()
    # Of two ranks, each looks at every other block.
    check((0, 2))
    with pytest.raises(CheckpointError, match=f"after byte {BLOCK_BYTES}"):
        check((1, 2))
    with open(path, "r+b") as file:
        file.write(b"X")
    with pytest.raises(CheckpointError, match=r"differ from what was written\. Choose"):
        check()
    assert damaged_files(manifest, tmp_path) == {"large": "contents differ from what was written"}
    record = manifest.files["large"]
    for wrong in (FileRecord(record.size + 1, record.digests), FileRecord(record.size, record.digests[:1])):
        with pytest.raises(CheckpointError, match=f"it has {record.size} bytes"):
            expected_digests(Manifest(1, 1, {}, {}, "now", {"large": wrong}), tmp_path)


def test_files_of_another_size(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert record_file(tmp_path / "empty") == FileRecord(0, (EMPTY,))
    empty = Manifest(1, 1, {}, {}, "now", {"empty": FileRecord(0, (EMPTY,))})
    assert expected_digests(empty, tmp_path) == {(tmp_path / "empty", 0): EMPTY}
    manifest = Manifest(1, 1, {"iteration": 0}, {}, "now", dict.fromkeys(("empty", "gone"), FileRecord(0, (EMPTY,))))
    assert manifest.differing_sizes(tmp_path) == ["gone"]
    assert damaged_files(manifest, tmp_path) == {"gone": "missing"}


def test_no_job_is_started_after_an_error() -> None:
    """Neither by a thread, nor by the caller where threads cannot be started."""
    done: list[str] = []

    def fail() -> None:
        raise OSError("no disk")

    started, go = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go.wait(60)

    with pytest.raises(KeyError), worker_threads(1) as submit:
        submit(wait)
        submit(lambda: done.append("after an error of the caller"))
        assert started.wait(60)
        threading.Timer(0.2, go.set).start()
        raise KeyError("of the caller")
    assert not done
    for count in (0, 1):
        with pytest.raises(OSError, match="no disk"), worker_threads(count) as submit:
            submit(fail)
            submit(lambda: done.append("after an error of a job"))
    assert not done
    with worker_threads(0) as submit:
        submit(lambda: done.append("without a thread"))
    assert done and not [thread for thread in threading.enumerate() if "checkpoint-worker" in thread.name]
