"""Checkpoints on a fast local disk, and their copies in object storage, which are made next to the training loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final

from accel_state import get_logger
from accel_state.errors import AccelError, ConfigurationError
from accel_state.paths import as_location
from accel_state.storage.url import Location, RemotePath

from .catalog import (
    CheckpointInfo,
    check_keep,
    list_checkpoints,
    newest_complete,
    newest_saved,
    numbered_checkpoints,
    rotate,
)
from .manifest import Manifest
from .names import NUMBERED, CheckpointError
from .remote.catalog import read_manifest
from .remote.directory import RemoteSave, new_save_id
from .save_process import ProcessHolder, is_possible
from .shared_memory import SharedMemory

logger: Final = get_logger(__name__)

# Checkpoints that wait for their upload, where nothing limits how many are kept.
_MAX_WAITING = 8


class Uploader:
    """Copies complete checkpoints into a store, one after the other, in another process.

    One process of a run uses it, the one that sees all files. The interpreter waits for it at exit. As a context
    manager it waits at the end of the block.

    Args:
        url: of the place in the store that checkpoints go to, each under its own name.
        keep: delete all but this many of the checkpoints there that are named ``checkpoint_<number>``, those with the
            lowest numbers first; None deletes none.

    Raises:
        ConfigurationError: it is not a URL of a store, or its library is not installed.
    """

    def __init__(self, url: str | os.PathLike[str], keep: int | None = None) -> None:
        place = as_location("url", url)
        if not isinstance(place, RemotePath):
            raise ConfigurationError(f"url={os.fspath(url)!r} must be the URL of a store, such as s3://bucket/run.")
        check_keep(keep)
        self.place: RemotePath = place
        self.keep: int | None = keep
        self._process = ProcessHolder()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Path, RemotePath, int | None]] = deque()
        self._current: Path | None = None
        self._runs = False
        self._error: BaseException | None = None

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    @property
    def in_flight(self) -> bool:
        """True if a checkpoint is still being uploaded, or waits for that."""
        return self._runs

    @property
    def needed(self) -> set[Path]:
        """The directories that are not in the store yet, and must not be deleted."""
        with self._changed:
            return {path for path, *_ in self._waiting} | ({self._current} if self._current is not None else set())

    def upload(
        self, directory: str | os.PathLike[str], to: RemotePath | None = None, keep_here: int | None = None
    ) -> RemotePath:
        """Begin to upload a complete checkpoint, and return.

        If uploading is slower than saving, those that wait longest are left out, with a warning.

        Args:
            directory: of the checkpoint.
            to: the place of the copy; by default its name in the place of this uploader.
            keep_here: afterwards, delete all but this many of the checkpoints next to it that are named
                ``checkpoint_<number>``, except those that still have to be uploaded. ``save(keep=...)`` would delete
                these too.

        Returns:
            The place of the copy.
        """
        path = Path(directory).resolve()
        target = self.place / path.name if to is None else to
        with self._changed:
            self._waiting.append((path, target, keep_here))
            while len(self._waiting) > (self.keep or _MAX_WAITING):
                left_out, *_ = self._waiting.popleft()
                logger.warning(
                    "%s is not uploaded to %s: uploading takes longer than the time between saves. Save less often.",
                    left_out,
                    self.place,
                )
            if not self._runs:
                self._runs = True
                # Not a daemon: the interpreter waits for it at exit.
                threading.Thread(target=self._run, name="accel-upload", daemon=False).start()
        return target

    def wait(self) -> None:
        """Return when everything is uploaded.

        Raises:
            CheckpointError: the last upload failed. The checkpoint is complete in its directory.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._runs)
            error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(str(error)) from error

    def close(self) -> None:
        """Wait, and end the process."""
        try:
            self.wait()
        finally:
            self._process.stop()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._current, self._runs = None, False
                    self._changed.notify_all()
                    return
                path, target, keep_here = self._waiting.popleft()
                self._current = path
            try:
                self._copy(path, target)
                self._error = None
            except BaseException as error:
                self._error = error
                logger.error("%s could not be uploaded to %s: %s", path, target, error, main_process_only=False)
            self._current = None
            if keep_here is not None:
                self._rotate(path.parent, keep_here)

    def _rotate(self, folder: Path, keep: int) -> None:
        try:
            numbered = list(numbered_checkpoints(folder).values())
            deleted = rotate(folder, keep, numbered[-1], self.needed) if numbered else ()
        except (OSError, AccelError) as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", folder, error, main_process_only=False)
            return
        if deleted:
            logger.info("Deleted %s: %d are kept.", ", ".join(path.name for path in deleted), keep)

    def _copy(self, path: Path, target: RemotePath) -> None:
        if target.protocol == "memory" or not is_possible():  # a store in the memory of this process
            copy_checkpoint(path, target, self.keep)
        else:
            self._process.call(SharedMemory(), copy_checkpoint, path, target, self.keep)


def copy_checkpoint(path: Path, target: RemotePath, keep: int | None) -> None:
    """Copy a complete checkpoint into a store, and delete old ones there.

    Args:
        path: its directory.
        target: the place of the copy.
        keep: how many with numbers to keep there; None keeps all.

    Raises:
        CheckpointError: it is not complete, or the store has lost a file.
        StoreError: the store has failed or refused.
    """
    manifest = Manifest.read(path)
    if manifest is None or (missing := manifest.differing_sizes(path)):
        lacking = "its manifest" if manifest is None else ", ".join(missing)
        raise CheckpointError(
            f"{path} is not complete: it lacks {lacking}. Upload a checkpoint that save has returned."
        )
    there = read_manifest(target)
    if there is None or (there.saved_at, there.files) != (manifest.saved_at, manifest.files):
        save = RemoteSave(target, new_save_id())
        try:
            save.begin()
            save.send(path, manifest.files)
            save.commit(manifest)
        except BaseException:
            save.abandon()
            raise
    if keep is not None and NUMBERED.fullmatch(target.name):
        rotate(target.parent, keep, target)


def newest(directory: str | os.PathLike[str], url: str | os.PathLike[str] | None = None) -> Location | None:
    """Return the newest complete checkpoint of a directory and of its copies in a store.

    The checkpoint of the directory where both have it. Otherwise the one that was saved later: the run may have gone
    on elsewhere.

    Args:
        directory: with checkpoints; it need not exist.
        url: of the place of their copies.

    Returns:
        None if there is none in either.

    Raises:
        ConfigurationError: there are some, and none is complete.
    """
    found = [_newest_of(as_location("directory", directory))]
    if url is not None:
        found.append(_newest_of(as_location("url", url)))
    infos = [CheckpointInfo.of(place) for place in found if place is not None]
    return max(infos, key=lambda info: info.saved).path if infos else None


def _newest_of(place: Location) -> Location | None:
    """Return the newest complete checkpoint in a place; None if there is nothing that ever was one."""
    if not isinstance(place, RemotePath) and not place.is_dir():
        return None
    infos = [info for info in list_checkpoints(place) if not info.unfinished]
    if not infos:
        return None
    return newest_complete(place) if numbered_checkpoints(place) else newest_saved(place)
