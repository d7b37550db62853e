"""Directories that get their name when they are complete: what stays, goes, and is refused at each step."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_checkpoint import atomic_dir, save
from accel_checkpoint.atomic_dir import (
    DELETED,
    PARTIAL,
    REPLACED,
    CheckpointDirectory,
    aside,
    delete,
    name_of,
    recover,
    recover_all,
    remove_leftovers,
)
from accel_checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.parts import Part
from accel_checkpoint.writer import StateWriter
from accel_state import PartialState
from accel_state.collectives.single import Collectives
from accel_state.errors import CollectiveTimeoutError, ConfigurationError
from accel_state.paths import LinkError
from accel_state.testing import run_world


@pytest.fixture(autouse=True)
def no_lock_is_left() -> Iterator[None]:
    before, atomic_dir._held = atomic_dir._held, set()
    yield
    left, atomic_dir._held = atomic_dir._held, before
    for descriptor in left:
        os.close(descriptor)
    assert not left


def _written(path: Path, text: str = "new", **others: str) -> CheckpointDirectory:
    """A directory with a checkpoint's file, which is listed, and others."""
    directory = CheckpointDirectory(path)
    directory.begin()
    _fill(directory.partial, text, **others)
    return directory


def _fill(folder: Path, text: str, **others: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text(text)
    listed = Manifest(1, 1, {"iteration": 0}, {}, "now", {"weights": FileRecord(len(text), ("",))})
    (folder / MANIFEST_NAME).write_text(listed.text())
    for name, content in others.items():
        (folder / name).write_text(content)


def _contents(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir() if file.name != MANIFEST_NAME}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_directory_is_replaced_and_the_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced = tmp_path / "deep" / "state", []
    monkeypatch.setattr(atomic_dir, "sync", lambda path: synced.append((path, sorted(os.listdir(path)))))
    directory = _written(target, "old", notes="mine")
    assert not target.exists()
    directory.commit()
    assert _contents(target) == {"weights": "old", "notes": "mine"}
    assert synced == [(target.parent, ["state"])]
    _written(target, "new").commit()
    assert _contents(target) == {"weights": "new", "notes": "mine"} and os.listdir(target.parent) == ["state"]


def test_what_a_rank_has_staged_is_taken(tmp_path: Path) -> None:
    """Folders are merged, and what a killed rank has left is removed by the next save."""
    directory, other, killed = (CheckpointDirectory(tmp_path / "state") for _ in range(3))
    killed.stage(2)
    killed.release()  # as when a process ends
    directory.begin()
    assert not killed.partial.exists()
    other.stage(1)
    for place, name in ((directory.partial, "of_0"), (other.partial, "of_1")):
        (place / "shards").mkdir()
        (place / "shards" / name).write_text(name)
        (place / name).write_text(name)
    with pytest.raises(ConfigurationError, match="taken already"):
        _written(tmp_path / "taken", "old").commit()
        CheckpointDirectory(tmp_path / "taken").begin("taken already")
    directory.take(other.partial)
    other.abandon()
    with pytest.raises(CheckpointError, match="does not see .*rank1"):
        directory.take(other.partial)
    directory.commit()
    assert sorted(os.listdir(directory.target)) == ["of_0", "of_1", "shards"]
    assert sorted(os.listdir(directory.target / "shards")) == ["of_0", "of_1"]
    assert sorted(os.listdir(tmp_path)) == ["state", "taken"]


def test_no_message_follows_one_that_was_lost(tmp_path: Path) -> None:
    """Which would wait as long once more, or be taken for another one."""

    class Lost(Collectives):
        world_size, messages = 2, 0

        def all_gather_object(self, value: Any) -> list[Any]:
            self.messages += 1
            raise CollectiveTimeoutError("rank 1 did not arrive")

    def lose(writer: StateWriter) -> None:
        writer.begin(collectives)
        raise CollectiveTimeoutError("rank 1 did not arrive")

    collectives = Lost()
    begin: Callable[[StateWriter], object]
    for begin, messages in (
        (lose, 0),
        (lambda writer: writer.begin(collectives), 1),
        (lambda writer: writer.begin_together(collectives), 1),
    ):
        collectives.messages = 0
        writer = StateWriter(tmp_path / "state", world_size=2)
        with pytest.raises(CheckpointError, match="rank 1 did not arrive"), writer.saving(collectives):
            begin(writer)
        assert collectives.messages == messages
    assert os.listdir(tmp_path) == []


def test_ranks_of_another_node_stage_there(tmp_path: Path) -> None:
    target = tmp_path / "state"
    staged = str(tmp_path / ".state.rank1.accel-partial")
    replies = [target, (staged, {"random_states_1.pkl": (1, ("",))}), (target, True)]

    class WithAnotherNode(Collectives):
        world_size = 2

        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, (value[0], None, replies.pop(0))]

    writer = StateWriter(target, world_size=2, each_node=True, parts=[Part("own.bin", 1)], counters={"iteration": 0})
    collectives = WithAnotherNode()
    with writer.saving(collectives):
        writer.begin(collectives)
    manifest = Manifest.read(target)
    assert manifest is not None and list(manifest.files) == ["own.bin"] and not replies


def stage_first(folder: str) -> None:
    if PartialState().process_index == 1:
        stage = CheckpointDirectory.stage

        def stage_unlocked(directory: CheckpointDirectory, rank: int) -> None:
            stage(directory, rank)
            directory.release()

        CheckpointDirectory.stage = stage_unlocked  # type: ignore[method-assign]
    else:
        while not Path(folder, ".state.rank1.accel-partial").exists():
            time.sleep(0.01)
    save({"value": 1}, Path(folder, "state"))


def test_what_ranks_stage_is_no_leftover(tmp_path: Path) -> None:
    """Also if the main process begins later, on a machine that does not see their locks."""
    killed = CheckpointDirectory(tmp_path / "state")
    killed.stage(2)
    killed.release()
    run_world(stage_first, 2, str(tmp_path))
    assert (tmp_path / "state" / "random_states_1.pkl").is_file() and not killed.partial.exists()


def test_sync_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, fsync, synced = _descriptors(), os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or fsync(descriptor))
    atomic_dir.sync(tmp_path)
    assert synced == [tmp_path.stat().st_ino]
    with pytest.raises(FileNotFoundError):
        atomic_dir.sync(tmp_path / "gone")
    assert _descriptors() == before


def test_places_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file is a file"):
        CheckpointDirectory(tmp_path / "file").begin()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="is the working directory"):
        CheckpointDirectory(".").begin()
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_save_wrote_is_not_part_of_the_next(tmp_path: Path) -> None:
    partial = aside(tmp_path / "state", PARTIAL)
    (partial / "folder" / "deep").mkdir(parents=True)
    (partial / "old").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (partial / "link").symlink_to(tmp_path / "precious")
    _fill(aside(tmp_path / "state", REPLACED), "old")
    aside(tmp_path / "other", PARTIAL).mkdir()
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    assert _contents(tmp_path / "state") == {"weights": "old"}
    assert sorted(os.listdir(tmp_path)) == [partial.name, "precious", "state"]
    assert os.listdir(partial) == [] and (tmp_path / "precious" / "file").exists()
    directory.abandon()


def test_known_files_are_there_with_their_size(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    (directory.partial / "same").write_text("12")
    (directory.partial / "longer").write_text("123")
    (directory.partial / "folder").mkdir()
    record = FileRecord(2, ("",))
    records = {**dict.fromkeys(("same", "longer", "gone"), record), "folder": FileRecord(4096, ("",))}
    assert directory.known(records) == {"same": record}
    directory.abandon()


def test_files_that_a_finalizer_removes_are_not_listed(tmp_path: Path) -> None:
    parts = [Part("merged.bin", 1), Part("rank.bin", 2)]
    finalizers = [lambda folder: (folder / "rank.bin").unlink()]
    writer = StateWriter(tmp_path / "state", parts=parts, counters={"iteration": 0}, finalizers=finalizers)
    collectives = PartialState(cpu=True).collectives
    with writer.saving(collectives):
        writer.begin(collectives)
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None and list(manifest.files) == ["merged.bin"]


def test_a_save_in_progress_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_dir, "_LOCK_ATTEMPTS", 2)
    before = _descriptors()
    first, second = _written(tmp_path / "state"), CheckpointDirectory(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another save to .*state is in progress"):
        second.begin()
    second.abandon()
    recover(tmp_path / "state")
    remove_leftovers(tmp_path)
    assert _contents(first.partial) == {"weights": "new"}
    assert first._lock is not None
    same_lock = os.dup(first._lock)  # as a process has that was forked by a library in C
    first.release()
    second.begin()
    second.commit()
    os.close(same_lock)
    assert os.listdir(tmp_path) == ["state"] and _descriptors() == before


def test_a_directory_that_disappears_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another program deletes it between being made and being locked."""
    lock, deleted = atomic_dir._lock, []

    def deleting(path: Path, **options: bool) -> int | None:
        descriptor = lock(path, **options)
        if len(deleted) < times:
            deleted.append(path)
            shutil.rmtree(path)
        return descriptor

    monkeypatch.setattr(atomic_dir, "_lock", deleting)
    times = 3
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    assert len(deleted) == 3 and directory.partial.is_dir()
    directory.abandon()
    times = 1000
    with pytest.raises(CheckpointError, match=r"was deleted \d+ times while it was made"):
        directory.begin()


def test_a_link_that_appears_before_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, directory = atomic_dir._lock, CheckpointDirectory(tmp_path / "state")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()

    def linking(path: Path, **options: bool) -> int | None:
        path.rmdir()
        path.symlink_to(tmp_path / "precious")
        return lock(path, **options)

    monkeypatch.setattr(atomic_dir, "_lock", linking)
    with pytest.raises(LinkError, match="accel-partial"):
        directory.begin()
    assert (tmp_path / "precious" / "file").exists()


def test_giving_up_leaves_what_was_there(tmp_path: Path) -> None:
    _written(tmp_path / "state", "old").commit()
    directory = _written(tmp_path / "state")
    directory.abandon()
    directory.abandon()
    directory.release()
    assert _contents(tmp_path / "state") == {"weights": "old"} and os.listdir(tmp_path) == ["state"]
    directory.begin()
    shutil.rmtree(directory.partial)  # by another program
    with pytest.raises(FileNotFoundError):
        directory.commit()
    assert _contents(tmp_path / "state") == {"weights": "old"} and os.listdir(tmp_path) == ["state"]
    directory.abandon()
    gone = CheckpointDirectory(tmp_path / "other")
    gone.begin()
    shutil.rmtree(gone.partial)
    with pytest.raises(FileNotFoundError, match="accel-partial"):
        gone.commit()
    gone.abandon()


def test_errors_of_writing_say_where_and_how_much_is_free(tmp_path: Path) -> None:
    directory = _written(tmp_path / "state")
    for error in (OSError(28, "full"), RuntimeError("[enforce fail at inline_container.cc:595]")):
        message = r"written to .*state, with [1-9]\d*\.\d MiB free"
        with pytest.raises(CheckpointError, match=message) as raised, directory.explaining_write_errors():
            raise error
        assert raised.value.__cause__ is error
    elsewhere = FileNotFoundError(2, "no such file", str(tmp_path / "data"))
    with pytest.raises(CheckpointError, match="could not be written"), directory.explaining_write_errors():
        raise elsewhere
    with pytest.raises(KeyError), directory.explaining_write_errors():
        raise KeyError("of a hook")
    directory.abandon()
    below = CheckpointDirectory(tmp_path / "gone" / "deeper" / "state")
    below.begin()
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="was deleted or replaced"), below.explaining_write_errors():
        raise OSError(5, "I/O")
    below.release()


def test_names_next_to_a_checkpoint() -> None:
    assert aside(Path("/a/b"), PARTIAL) == Path("/a/.b.accel-partial")
    for kind in (PARTIAL, REPLACED, DELETED):
        assert name_of(aside(Path("/a/b.c"), kind), kind) == "b.c"
        for other in (f"b.{kind}", ".b", f".{kind}", f".b{kind}", "b"):
            assert name_of(Path("/a", other), kind) is None


def test_an_interrupted_replacement_is_undone_or_finished(tmp_path: Path) -> None:
    target = tmp_path / "state"
    replaced = aside(target, REPLACED)
    for call in (lambda: recover(target), lambda: recover_all(tmp_path), lambda: remove_leftovers(tmp_path)):
        call()
        assert os.listdir(tmp_path) == []
        _fill(replaced, "old", notes="mine")
        call()  # killed between the two renames
        assert _contents(target) == {"weights": "old", "notes": "mine"} and os.listdir(tmp_path) == ["state"]
        target.rename(replaced)
        _fill(target, "new", plot="new")
        (replaced / "plot").write_text("old")
        (replaced / "model.safetensors").touch()  # a checkpoint's, though it is not listed
        call()  # killed after them
        assert _contents(target) == {"weights": "new", "notes": "mine", "plot": "new"}
        assert os.listdir(tmp_path) == ["state"]
        shutil.rmtree(target)
    # Without a manifest that can be read, what a checkpoint has is known by its names.
    _fill(target, "new")
    replaced.mkdir()
    (replaced / MANIFEST_NAME).write_text("{")
    (replaced / "optimizer.bin").touch()
    (replaced / "notes").write_text("mine")
    recover(target)
    assert _contents(target) == {"weights": "new", "notes": "mine"} and os.listdir(tmp_path) == ["state"]


def test_a_save_that_is_being_made_recovers_itself(tmp_path: Path) -> None:
    target = tmp_path / "state"
    directory = _written(target)
    _fill(directory.replaced, "old")
    recover(target)
    assert directory.replaced.exists() and not target.exists()
    directory.release()
    recover(target)
    assert _contents(target) == {"weights": "old"} and not directory.replaced.exists()


def test_links_next_to_a_checkpoint(tmp_path: Path) -> None:
    target, precious = tmp_path / "state", tmp_path / "precious"
    precious.mkdir()
    for kind in (PARTIAL, REPLACED, DELETED):
        link = aside(target, kind)
        link.symlink_to(precious)
        with pytest.raises(LinkError, match=link.name):
            CheckpointDirectory(target).begin()
        if kind == REPLACED:
            with pytest.raises(LinkError):
                recover(target)
        recover_all(tmp_path)
        remove_leftovers(tmp_path)
        assert link.is_symlink() and precious.is_dir()
        link.unlink()
    aside(target, REPLACED).mkdir()
    aside(target, PARTIAL).symlink_to(precious)
    with pytest.raises(LinkError):
        recover(target)
    recover_all(tmp_path)
    assert aside(target, REPLACED).is_dir() and not target.exists()
    target.symlink_to(precious)
    for one, other in ((target, tmp_path / "temporary"), (precious, target)):
        with pytest.raises(LinkError):
            delete(one, other)
    assert precious.is_dir()


def test_deleting_begins_with_a_name_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path / "state", "old")
    temporary = aside(tmp_path / "state", DELETED)
    _fill(temporary, "left by a killed process")
    seen, rmtree = [], shutil.rmtree

    def remove(path: Path, **options: bool) -> None:
        seen.append((sorted(os.listdir(tmp_path)), _contents(Path(path))))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    delete(tmp_path / "state", temporary)
    assert seen == [
        ([temporary.name, "state"], {"weights": "left by a killed process"}),
        ([temporary.name], {"weights": "old"}),
    ]
    assert os.listdir(tmp_path) == []


def test_leftovers_are_counted(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path) == 0
    for name in ("one", "two"):
        _fill(aside(tmp_path / name, PARTIAL), "unfinished")
    _fill(aside(tmp_path / "two", DELETED), "old")
    aside(tmp_path / "file", PARTIAL).touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / ".accel-partial").mkdir()
    assert remove_leftovers(tmp_path, skip=aside(tmp_path / "one", PARTIAL)) == 1
    assert remove_leftovers(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == [".accel-partial", ".file.accel-partial", "kept"]
    _fill(aside(tmp_path / "back", REPLACED), "old")
    assert remove_leftovers(tmp_path) == 1 and _contents(tmp_path / "back") == {"weights": "old"}


def test_another_process_is_quicker_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree = shutil.rmtree

    def twice(path: Path, **options: bool) -> None:
        rmtree(path)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", twice)
    for kind in (PARTIAL, DELETED):
        _fill(aside(tmp_path / "one", kind), "old")
    remove_leftovers(tmp_path)
    _fill(tmp_path / "two", "old")
    delete(tmp_path / "two", aside(tmp_path / "two", DELETED))
    _written(tmp_path / "three").abandon()
    assert os.listdir(tmp_path) == []


def test_a_leftover_that_another_process_renames_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being found and being locked it was deleted, and another save began under its name."""
    partial, lock = aside(tmp_path / "state", PARTIAL), atomic_dir._lock
    partial.mkdir()

    def replaced(path: Path, **options: bool) -> int | None:
        descriptor = lock(path, **options)
        os.rename(path, tmp_path / "moved")
        _fill(path, "of another process")
        return descriptor

    monkeypatch.setattr(atomic_dir, "_lock", replaced)
    remove_leftovers(tmp_path)
    assert _contents(partial) == {"weights": "of another process"}
    monkeypatch.undo()
    partial.rename(tmp_path / "gone")
    assert atomic_dir._lock_leftover(partial) is None


def test_a_forked_process_has_no_locks(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "state")
    directory.begin()
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        held = f"/proc/{os.getpid()}/fd"
        names = [os.readlink(f"{held}/{name}") for name in os.listdir(held) if os.path.lexists(f"{held}/{name}")]
        os.write(outside, b"held" if str(directory.partial) in names or atomic_dir._held else b"free")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(inside, 4) == b"free" and len(atomic_dir._held) == 1
    os.close(inside), os.close(outside)
    directory.abandon()
