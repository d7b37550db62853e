"""Checkpoints in object storage: a store in memory with faults, and an S3 server."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from components import ssh
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import KINDS, SECRET, client, keys, s3_server, uploads
from torch import nn

from accel_checkpoint import AsyncSaver, CheckpointError, list_checkpoints, load, newest_complete, save, verify
from accel_checkpoint.commands.checkpoint import run
from accel_checkpoint.manifest import record_file
from accel_checkpoint.remote import directory as remote_directory
from accel_checkpoint.remote.reading import RemoteFiles
from accel_checkpoint.sharded import reader
from accel_checkpoint.sharded.writer import TensorWriter
from accel_state.errors import ConfigurationError
from accel_state.paths import as_location
from accel_state.storage import store as storage
from accel_state.storage.s3_transfer import _S3, transfer
from accel_state.storage.store import MarkerTakenError, Store, StoreError, is_gone, owner
from accel_state.storage.url import RemotePath

MANIFEST = "accel_manifest.json"


class Faulty(MemoryFileSystem):
    """A store in memory that fails as told."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[dict[str, list[BaseException]]] = {}
    lost: ClassVar[tuple[str, ...]] = ()
    late: ClassVar[int] = 0
    calls: ClassVar[list[str]] = []

    def _fault(self, operation: str, path: str) -> None:
        type(self).calls.append(operation)
        for name, errors in self.faults.items():
            if name in (operation, "any") and errors:
                raise errors.pop(0)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._fault("read", path)
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        self._fault("write", path)
        super().pipe_file(path, value, *args, **kwargs)

    def put_file(self, source: str, path: str, *args: Any, **kwargs: Any) -> None:
        self._fault("upload", path)
        if not path.endswith(self.lost):
            super().put_file(source, path, *args, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._fault("list", path)
        found = super().find(path, *args, **kwargs)
        if type(self).late and found:
            type(self).late -= 1
            found = dict(list(found.items())[:-1])
        return found


read_ranges = Store.read_ranges


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[Faulty]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store, Faulty.pseudo_dirs, Faulty.faults, Faulty.lost, Faulty.late, Faulty.calls = {}, [""], {}, (), 0, []
    Faulty.lost = ("<nothing>",)
    monkeypatch.setattr(storage, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote_directory, "_PAUSE_SECONDS", 0.001)
    return Faulty


def inside(place: str) -> set[str]:
    """The names in a place of the store in memory."""
    return {path.partition(f"/{place}/")[2].split("/")[0] for path in Faulty.store if f"/{place}/" in path}


def state(value: float = 1.0) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "step": int(value)}


def test_save_load_and_delete(faulty: type[Faulty], capsys: pytest.CaptureFixture[str]) -> None:
    url = "faulty://bucket/run"
    model = nn.Linear(3, 2)
    for number in range(4):
        saved = save({"model": model, "step": number}, f"{url}/checkpoint_{number}", step=number, keep=2)
    assert str(saved) == f"{url}/checkpoint_3" and saved == newest_complete(url)
    assert [info.path.name for info in list_checkpoints(url) if info.complete] == ["checkpoint_2", "checkpoint_3"]
    other = nn.Linear(3, 2)
    assert load(saved, {"model": other})["step"] == 3 and torch.equal(other.weight, model.weight)
    # Replacing one leaves only the new files.
    save({"step": 9}, saved, rng=False)
    assert load(saved)["step"] == 9 and verify(saved) == {}
    (prefix,) = inside("checkpoint_3") - {MANIFEST}
    assert not [path for path in Faulty.store if ".owner" in path or ".records" in path]
    assert run(["list", url]) == 0 and "checkpoint_3" in capsys.readouterr().out
    assert run(["verify", str(saved)]) == 0
    (damaged,) = [path for path in Faulty.store if path.endswith(f"checkpoint_3/{prefix}/step.bin")]
    content = bytearray(Faulty.store[damaged].getvalue())
    content[len(content) // 2] ^= 1
    MemoryFileSystem.pipe_file(Faulty(), damaged, bytes(content))
    assert list(verify(saved)) == ["step.bin"] and run(["verify", str(saved)]) == 1
    with pytest.raises(CheckpointError, match=r"faulty://bucket/run/checkpoint_3.*step\.bin"):
        load(saved)


def test_in_the_background(faulty: type[Faulty]) -> None:
    with AsyncSaver() as saver:
        content = state(5)
        saver.save(content, "faulty://bucket/a")
        content["weights"].zero_()
    assert load("faulty://bucket/a")["weights"].eq(5).all()


@pytest.mark.parametrize("operation", ["read", "write", "upload", "list"])
def test_a_store_that_fails_for_a_while(operation: str, faulty: type[Faulty]) -> None:
    save(state(), "faulty://bucket/a")
    faulty.faults = {operation: [OSError("503 Slow Down"), TimeoutError("hangs"), ConnectionError("reset")]}
    save(state(2), "faulty://bucket/a")
    assert not faulty.faults[operation] and load("faulty://bucket/a")["step"] == 2


@pytest.mark.parametrize("operation", ["write", "upload"])
@pytest.mark.parametrize("error", [PermissionError("token expired"), OSError("503")], ids=["refused", "down"])
def test_a_save_that_fails_leaves_the_older_one(operation: str, error: BaseException, faulty: type[Faulty]) -> None:
    save(state(), "faulty://bucket/a")
    faulty.calls.clear()
    faulty.faults = {operation: [error] * 50}
    with pytest.raises(StoreError, match=r"faulty://bucket/a.*(token expired|503)"):
        save(state(2), "faulty://bucket/a")
    # What is refused is not tried again, and nothing is tried forever.
    assert faulty.calls.count(operation) <= (8 if isinstance(error, PermissionError) else 8 * storage._ATTEMPTS)
    faulty.faults = {}
    assert load("faulty://bucket/a")["step"] == 1
    save(state(3), "faulty://bucket/a")
    assert len(inside("a")) == 2  # the marker and one prefix


def test_what_a_store_says_is_shown_without_secrets(faulty: type[Faulty]) -> None:
    faulty.faults = {"upload": [PermissionError("refused: AWS_SECRET_ACCESS_KEY=hunter22hunter22")] * 50}
    with pytest.raises(StoreError, match="refused") as raised:
        save(state(), "faulty://bucket/a")
    assert "hunter22" not in str(raised.value)


def test_a_store_that_loses_an_object(faulty: type[Faulty]) -> None:
    save(state(), "faulty://bucket/a")
    faulty.lost = ("weights.bin",)
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        save(state(2), "faulty://bucket/a")
    assert load("faulty://bucket/a")["step"] == 1


def test_a_store_that_lists_late(faulty: type[Faulty]) -> None:
    faulty.late = 2
    save(state(), "faulty://bucket/a")
    assert load("faulty://bucket/a")["step"] == 1


def test_a_save_that_ends_while_another_process_cleans(faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(), "faulty://bucket/a")
    store = Store(RemotePath("faulty://bucket/a"))
    marker = store.read(MANIFEST)
    assert marker is not None
    store.delete(MANIFEST)
    real = Store.names

    def ended_meanwhile(self: Store, path: str = "") -> list[str]:
        found = real(self, path)
        self.write(MANIFEST, marker)  # its owner is gone as well
        return found

    monkeypatch.setattr(Store, "names", ended_meanwhile)
    assert remote_directory.clean(store, None) == 0
    assert load("faulty://bucket/a")["step"] == 1


def test_files_of_shards_are_held_one_group_at_a_time(
    faulty: type[Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BATCH_BYTES", 1)
    writer = TensorWriter(tmp_path, file_bytes=1)
    for number in range(4):
        writer.add([f"model.w{number}"], torch.full((1000,), float(number)), [1000], [0])
    names = writer.finish()
    store = Store(RemotePath("faulty://bucket/shards"))
    store.upload([(tmp_path / name, f"data/{name}") for name in names])
    source = RemoteFiles(store, "data", {name: record_file(tmp_path / name) for name in names})
    held = []
    monkeypatch.setattr(Store, "read_ranges", lambda *args: held.append(len(source._files)) or read_ranges(*args))
    read = reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model", source)
    assert all(read[f"w{number}"].eq(number).all() for number in range(4))
    assert len(held) == 4 and max(held) == 0 and not source._files
    # The digests are of the bytes that are read, not of a copy.
    path = next(path for path in Faulty.store if path.endswith("__0_2.distcp"))
    content = bytearray(Faulty.store[path].getvalue())
    content[content.find(torch.full((1000,), 2.0).numpy().tobytes()) + 5] ^= 1
    MemoryFileSystem.pipe_file(Faulty(), path, bytes(content))
    source = RemoteFiles(store, "data", {name: record_file(tmp_path / name) for name in names})
    with pytest.raises(CheckpointError, match=r"__0_2\.distcp is damaged"):
        reader.read_shards(tmp_path, lambda path, size, dtype: torch.empty(size, dtype=dtype), "model", source)


def test_two_runs_that_save_to_one_place(faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(), "faulty://bucket/a")
    real = remote_directory.RemoteSave.require
    inner = []

    def other_run_first(self: Any, *arguments: Any) -> None:
        if not inner:
            inner.append(1)
            save(state(7), "faulty://bucket/a")
        real(self, *arguments)

    monkeypatch.setattr(remote_directory.RemoteSave, "require", other_run_first)
    with pytest.raises(MarkerTakenError, match="faulty://bucket/a"):
        save(state(2), "faulty://bucket/a")
    assert load("faulty://bucket/a")["step"] == 7
    assert len(inside("a")) == 2


def test_leftovers_belong_to_processes_that_have_ended(
    faulty: type[Faulty], capsys: pytest.CaptureFixture[str]
) -> None:
    place = RemotePath("faulty://bucket/a")
    store = Store(place)
    save(state(), place)
    begun = int(time.time())
    dead = owner().rpartition(":")[0] + ":1"  # the number of this process, used by an earlier one
    other_machine = f"elsewhere/4026531836:1:{begun}"
    for name, text in (("dead", dead), ("other", other_machine)):
        store.write(f"data-{begun}-{name}/.owner", text.encode())
        store.write(f"data-{begun}-{name}/part", b"x")
    store.write("data-1000-old/.owner", other_machine.encode())
    store.write("data-1000-nameless/part", b"x")
    assert run(["clean", "faulty://bucket/a"]) == 0 and "3" in capsys.readouterr().out
    left = inside("a")
    assert len(left) == 3 and f"data-{begun}-other" in left and load(place)["step"] == 1
    assert is_gone(owner()) is False and is_gone(dead) is True and is_gone(other_machine) is None


def test_a_marker_of_a_newer_version(faulty: type[Faulty]) -> None:
    save(state(), "faulty://bucket/a")
    store = Store(RemotePath("faulty://bucket/a"))
    newer = json.loads(store.read(MANIFEST) or b"")
    newer["format"] = 2
    store.write(MANIFEST, json.dumps(newer).encode())
    with pytest.raises(CheckpointError, match="format 2"):
        load("faulty://bucket/a")
    # A save leaves the files of what it cannot read where they are.
    before = len(faulty.store)
    with pytest.raises(CheckpointError, match="format 2"):
        save(state(2), "faulty://bucket/a")
    assert len(faulty.store) == before


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("s3://", "s3://"),
        ("s3://bucket/../x", r"\.\."),
        ("s3://bucket/a?versionId=1", "query"),
        ("simplecache::s3://bucket/a", "simplecache"),
    ],
)
def test_urls_that_cannot_be_used(value: str, shown: str) -> None:
    with pytest.raises(ConfigurationError, match=shown):
        save(state(), value)


def test_an_unknown_protocol() -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        save(state(), "nowhere://bucket/a")


def test_paths_of_urls() -> None:
    place = RemotePath("s3://bucket/a/b/")
    assert (place.name, str(place.parent), str(place / "c")) == ("b", "s3://bucket/a", "s3://bucket/a/b/c")
    assert RemotePath("s3://bucket").parent == RemotePath("s3://bucket") and os.fspath(place) == "s3://bucket/a/b"
    assert "hunter22hunter22" not in str(RemotePath("sftp://user:hunter22hunter22@host/x"))
    assert as_location("x", "file:///tmp/a") == Path("/tmp/a") and as_location("x", place) == place


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


# The servers that are programs run where scripts/components has installed them.
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_on_servers_of_several_kinds(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with s3_server(kind):
        for number in range(3):
            saved = save(state(number), f"s3://bucket/run/checkpoint_{number}", step=number, keep=1)
        assert [info.path for info in list_checkpoints("s3://bucket/run")] == [saved] and load(saved)["step"] == 2
        assert [key for key in keys("run/") if key.endswith(MANIFEST)] == [f"checkpoint_2/{MANIFEST}"]
        # A process that was killed in the middle of an upload in parts, of this checkpoint and of none.
        for key in ("run/checkpoint_2/data-1000-dead/part", "elsewhere/part"):
            client().create_multipart_upload(Bucket="bucket", Key=key)
        save(state(8), saved)
        assert load(saved)["step"] == 8
        assert kind == "rclone" or uploads() == ["elsewhere/part"]
        compare_markers(kind)
        # rclone takes what it should refuse, and that is said once.
        assert [record.levelname for record in caplog.records if "conditional" in record.message] == (
            ["WARNING"] if kind == "rclone" else []
        )


@pytest.mark.component
@pytest.mark.skipif(bool(ssh.missing()), reason=ssh.missing())
def test_over_sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    folder = tmp_path / "ssh"
    folder.mkdir()
    with ssh.SshServer(folder) as server:
        (tmp_path / ".ssh").mkdir()
        shutil.copy(folder / "key", tmp_path / ".ssh" / "id_ed25519")
        monkeypatch.setenv("HOME", str(tmp_path))  # where the client looks for keys
        place = f"sftp://{getpass.getuser()}@127.0.0.1:{server.port}{tmp_path}/run"
        try:
            for number in range(3):
                saved = save(state(number), f"{place}/checkpoint_{number}", step=number, keep=1)
            save(state(8), saved)
            assert [info.path for info in list_checkpoints(place)] == [saved]
            found = load(saved)
            assert found["step"] == 8 and found["weights"].eq(8).all()
            assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["checkpoint_2"]
            data = [entry.name for entry in (tmp_path / "run/checkpoint_2").iterdir() if entry.is_dir()]
            assert len(data) == 1
            # Another run has saved meanwhile.
            store = Store(RemotePath(str(saved)))
            with pytest.raises(MarkerTakenError):
                store.write_marker(MANIFEST, b"{}", None, "probe")
        finally:
            close_connections("sftp")


def close_connections(protocol: str) -> None:
    """End the connections of a protocol's file systems, and their threads."""
    kind = fsspec.get_filesystem_class(protocol)
    for system in list(kind._cache.values()):
        system.client.close()
    kind.clear_instance_cache()


def compare_markers(kind: str) -> None:
    """Markers are written only in the place of the one that was read."""
    store = Store(RemotePath("s3://bucket/marker"))
    store.write_marker("m", b"first", None, "probe")
    for content, replaced in ((b"second", None), (b"third", b"other")):
        with pytest.raises(MarkerTakenError):
            store.write_marker("m", content, replaced, "probe")
    store.write_marker("m", b"first", None, "probe")  # an attempt whose answer was lost
    store.write_marker("m", b"second", b"first", "probe")
    assert store.read("m") == b"second"
    # Another run writes after this one has looked: the server itself refuses, if it can.
    for replaced, other in ((None, b"other"), (b"mine", b"theirs")):
        store = Store(RemotePath(f"s3://bucket/race-{replaced is None}"))
        if replaced is not None:
            store.write("m", replaced)
        look = store.read

        def late(path: str, store: Store = store, look: Any = look, other: bytes = other) -> bytes | None:
            found: bytes | None = look(path)
            if found != other:
                store.write(path, other)
            return found

        store.read = late  # type: ignore[method-assign]
        if kind == "rclone":
            store.write_marker("m", b"new", replaced, "probe")
        else:
            with pytest.raises(MarkerTakenError):
                store.write_marker("m", b"new", replaced, "probe")
            assert look("m") == other


def test_large_files_are_sent_in_parts(s3: dict[str, str], tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 120
    (tmp_path / "large").write_bytes(content)
    store = Store(RemotePath("s3://bucket/large"))
    store.upload([(tmp_path / "large", "x")])
    head = client().head_object(Bucket="bucket", Key="large/x")
    assert head["ContentLength"] == len(content) and "-" in head["ETag"]  # of several parts
    assert store.read_ranges([("x", 5, 9), ("x", 100, 101)]) == [content[5:9], content[100:101]]


def test_what_transfers_files(s3: dict[str, str], tmp_path: Path) -> None:
    """s3transfer, but not where a key is not in the environment, which it would not find."""
    (tmp_path / "file").write_bytes(b"content")
    with transfer(Store(RemotePath("s3://bucket/x"))._fs) as by:
        assert isinstance(by, _S3)
        by.put(str(tmp_path / "file"), "bucket/x/file")
        with pytest.raises(FileNotFoundError):
            by.get("bucket/x/nothing", str(tmp_path / "other"))
    with transfer(fsspec.filesystem("s3", key="k", secret="s")) as by:
        assert not isinstance(by, _S3)
    assert keys("x/") == ["file"]


def test_no_bucket_and_no_secret_in_the_error(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((StoreError, CheckpointError), match="s3://nobucket") as raised:
        save(state(), "s3://nobucket/a")
    assert SECRET not in str(raised.value)
    save({"x": 1}, "s3://bucket/secrets")
    assert SECRET not in "".join(map(str, client().get_object(Bucket="bucket", Key=f"secrets/{MANIFEST}")["Body"]))


KILLED = """
import os, sys, threading, time, torch
from accel_checkpoint import load, save
number = int(sys.argv[1])
timer = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), 9))
save({"step": 0}, "s3://bucket/warm")  # loads what the first save needs
print("ready", flush=True)
sys.stdin.readline()
timer.start()
while True:
    number += 1
    state = {"weights": torch.full((300_000,), float(number)), "step": number}
    save(state, f"s3://bucket/kill/checkpoint_{number}", keep=2)
"""


@pytest.mark.slow  # a Python with torch for each kill
@pytest.mark.timeout(600)
def test_killed_at_random_times(s3: dict[str, str]) -> None:
    number = 0
    for kill in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(number), str(0.5 + 0.35 * kill)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.communicate("go\n", timeout=200)
        assert process.returncode == -signal.SIGKILL
        complete = [info for info in list_checkpoints("s3://bucket/kill") if info.complete]
        if complete:
            newest = newest_complete("s3://bucket/kill")
            found = load(newest)
            assert found["weights"].eq(found["step"]).all() and found["step"] >= number
            number = found["step"]
    assert number > 0
    saved = save(state(number + 1), f"s3://bucket/kill/checkpoint_{number + 1}", keep=2)
    run(["clean", "s3://bucket/kill"])
    assert {key.split("/")[0] for key in keys("kill/")} == {saved.name, f"checkpoint_{number}"} and not uploads()
    assert not [key for key in keys("kill/") if ".owner" in key or ".records" in key]
