"""A checkpoint that is being written to object storage.

There is no rename in a store. The files of a save go under a prefix of their own, and a marker with the manifest is
written last: a checkpoint without a marker does not exist, and an older one stays until the marker names the new
prefix.

    <target>/accel_manifest.json        the marker; its "prefix" is the name of the next line
    <target>/data-<time>-<id>/...       the files
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from accel_state import get_logger
from accel_state.errors import ConfigurationError
from accel_state.paths import refuse_link
from accel_state.storage.store import Store, StoreError, is_gone, owner
from accel_state.storage.url import RemotePath

from ..atomic_dir import CheckpointDirectory
from ..manifest import FileRecord, Manifest, record_file
from ..names import MANIFEST_NAME, CheckpointError
from ..save_process import ProcessWriter, UnknownHereError

logger: Final = get_logger(__name__)

PREFIX = "data-"
OWNER_NAME = ".owner"
_PROBE_NAME = ".probe"
# What a process on another machine has left is taken for dead after this time.
_DEAD_AFTER_SECONDS = 24 * 3600
# A store may list what was written a moment later.
_LISTINGS, _PAUSE_SECONDS = 4, 0.5

_active: set[str] = set()
"""Saves of this process that have not ended."""


def new_save_id() -> str:
    """Return the prefix of a save, the same on all ranks."""
    return f"{PREFIX}{int(time.time())}-{uuid.uuid4().hex[:12]}"


class RemoteSave:
    """A save to a place, of files that are in a directory of this machine.

    Args:
        target: where the checkpoint goes.
        save_id: its prefix; the same on all ranks.
    """

    def __init__(self, target: RemotePath, save_id: str) -> None:
        self.target = target
        self.save_id = save_id
        self.store: Store = Store(target)
        self.process: ProcessWriter | None = None  # sends files in another process
        self._replaced: bytes | None = None
        self._sent: set[str] = set()

    def begin(self) -> None:
        """Prepare for writing, and remove what killed processes have left of saves to the same place."""
        self._replaced = self.store.read(MANIFEST_NAME)
        # What a newer version has written is not replaced: its files could not be found.
        prefix_of(self._replaced, f"{self.target}/{MANIFEST_NAME}")
        clean(self.store, self._replaced)
        _active.add(self.save_id)
        self.store.write(f"{self.save_id}/{OWNER_NAME}", owner().encode())

    def send(self, folder: Path, names: Iterable[str]) -> None:
        """Send files that were not sent before."""
        pairs = []
        for name in names:
            if name not in self._sent:
                refuse_link(folder / name)
                pairs.append((folder / name, f"{self.save_id}/{name}"))
                self._sent.add(name)
        if self.process is not None:
            try:
                self.process.upload(self.target, pairs)
                return
            except UnknownHereError as error:
                logger.info("%s is sent by a thread of the training process: %s", self.target, error)
        self.store.upload(pairs)

    def commit(self, manifest: Manifest) -> None:
        """Write the marker, when everything is sent, and delete what it replaces."""
        # A marker must not name a file that the store has lost.
        self.require(lambda: list(differing(self.store, self.save_id, manifest)), len(manifest.files))
        marker = replace(manifest, prefix=self.save_id).text().encode("ascii")
        self.store.write_marker(MANIFEST_NAME, marker, self._replaced, f"{self.save_id}/{_PROBE_NAME}")
        _active.discard(self.save_id)
        try:
            self.store.delete(f"{self.save_id}/{OWNER_NAME}")
            for entry in self.store.files(self.save_id):
                if entry.path not in manifest.files:
                    self.store.delete(f"{self.save_id}/{entry.path}")
            clean(self.store, marker, replaced=self._replaced)
        except StoreError as error:
            logger.warning("%s is complete, but what it replaces could not be deleted: %s", self.target, error)

    def require(self, lacking: Callable[[], list[str]], count: int) -> None:
        """Wait until the store lists everything; raise CheckpointError with what it lacks if that takes too long."""
        missing: list[str] = []
        for attempt in range(_LISTINGS):
            if attempt:
                time.sleep(_PAUSE_SECONDS * 2**attempt)
            missing = lacking()
            if not missing:
                return
        raise CheckpointError(
            f"{self.target} has lost {', '.join(missing[:5])} of {count} files that were sent: the store "
            "does not list them. Save again; an older checkpoint there is unchanged."
        )

    def abandon(self) -> None:
        """Remove what was sent; an older checkpoint stays as it was."""
        _active.discard(self.save_id)
        try:
            self.store.delete_tree(self.save_id)
            self.store.abort_uploads(lambda path: path.startswith(f"{self.save_id}/"))
        except StoreError as error:
            logger.warning("an unfinished save is left, which the next one removes: %s", error)


class RemoteDirectory:
    """A checkpoint that is being written, with the methods of :class:`.atomic_dir.CheckpointDirectory`.

    Each rank writes its files into a directory of its own in the machine's directory for temporary files (which
    TMPDIR selects), and sends them.

    Args:
        target: where the checkpoint goes.
        save_id: its prefix; the same on all ranks.
    """

    shared = False  # whether ranks write into one directory

    def __init__(self, target: RemotePath, save_id: str) -> None:
        self.target = target
        self.save_id = save_id
        self._save = RemoteSave(target, save_id)
        name = hashlib.blake2b(f"{target.url} {save_id} {os.getpid()}".encode(), digest_size=12).hexdigest()
        self._local = CheckpointDirectory(_staging_folder() / name)
        self.partial: Path = self._local.partial
        self._is_writer = False

    def send_in(self, process: ProcessWriter) -> None:
        """Send files in another process."""
        self._save.process = process

    def begin(self, existing: str = "", ranks: int = 1) -> None:
        """Prepare for writing, and remove what killed processes have left of saves to the same place.

        Args:
            existing: the error if there is a checkpoint of this name already; "" replaces it.
            ranks: how many save it; each has a directory of its own name.
        """
        del ranks
        if existing and self._save.store.read(MANIFEST_NAME) is not None:
            raise ConfigurationError(existing)
        self._is_writer = True
        self._save.begin()
        self._local.begin()

    def join(self) -> None:
        """Prepare for writing where another rank has begun."""
        self._local.begin()

    def hand_over(self, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Send the files of this rank, and return their records; those of hooks are added."""
        own = dict(records)
        for path in self._files():
            if path not in own:
                own[path] = record_file(self.partial / path)
        self._save.send(self.partial, own)
        if not self._is_writer:
            self._local.abandon()
        return own

    def known(self, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return all of them: whether the store has the files is known when everything is sent."""
        return dict(records)

    def commit(self, manifest: Manifest) -> None:
        """Send what is left, and write the marker."""
        self._save.send(self.partial, [name for name in self._files() if name != MANIFEST_NAME])
        self._save.commit(manifest)
        self._local.abandon()

    def _files(self) -> list[str]:
        return [path.relative_to(self.partial).as_posix() for path in self.partial.rglob("*") if path.is_file()]

    def abandon(self) -> None:
        """Remove what was written; an older checkpoint stays as it was."""
        self._local.abandon()
        if self._is_writer:
            self._save.abandon()

    def explaining_write_errors(self) -> AbstractContextManager[None]:
        """Raise the block's file system errors as CheckpointError with the free space."""
        return self._local.explaining_write_errors()


def _staging_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"accel-checkpoint-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    refuse_link(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise CheckpointError(f"{folder} belongs to another user. Set TMPDIR to a directory of your own.")
    return folder


def prefix_of(marker: bytes | None, where: str) -> str:
    """Return the prefix that a marker names; "" without one."""
    return "" if marker is None else Manifest.parse(marker, where).prefix


def clean(store: Store, marker: bytes | None, replaced: bytes | None = None) -> int:
    """Delete what killed processes have left of saves to one place, and what a marker has replaced.

    Args:
        store: of the place.
        marker: the contents of the marker; None if there is none.
        replaced: those of the marker before it.

    Returns:
        How many unfinished saves and uploads there were.
    """
    where = f"{store.place}/{MANIFEST_NAME}"
    try:
        kept, old = prefix_of(marker, where), prefix_of(replaced, where)
    except CheckpointError as error:
        logger.warning("nothing was removed: %s", error)
        return 0
    count = 0
    dead: dict[str, bool] = {}

    def is_dead(prefix: str) -> bool:
        if prefix not in dead:
            left = prefix not in ("", kept)
            dead[prefix] = left and (prefix == old or (_is_dead(store, prefix) and not named(prefix)))
        return dead[prefix]

    def named(prefix: str) -> bool:
        # The save may have ended since the marker was read: it writes the marker, and then removes its owner.
        return prefix == prefix_of(store.read(MANIFEST_NAME), where)

    for name in store.names():
        if name.startswith(PREFIX) and is_dead(name):
            count += store.delete_tree(name)
    count += store.abort_uploads(lambda path: path.startswith(PREFIX) and is_dead(path.partition("/")[0]))
    return count


def _is_dead(store: Store, prefix: str) -> bool:
    """Return True if the process that has begun a save has ended."""
    if prefix in _active:
        return False
    content = store.read(f"{prefix}/{OWNER_NAME}")
    if content is None:
        return True  # written first, and removed when the marker names the prefix, or when it is being deleted
    name = content.decode(errors="replace")
    gone = is_gone(name)
    if gone is None:
        began = prefix.removeprefix(PREFIX).partition("-")[0]
        return began.isdigit() and time.time() - int(began) > _DEAD_AFTER_SECONDS
    return gone or name == owner()  # of this process, but not one that it is writing


def differing(store: Store, prefix: str, manifest: Manifest) -> dict[str, str]:
    """Return the files of a manifest that a store does not list as they were written, with what is wrong."""
    sizes = {entry.path: entry.size for entry in store.files(prefix)}
    return {
        name: "has another size" if name in sizes else "missing"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.size
    }
