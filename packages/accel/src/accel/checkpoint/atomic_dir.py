"""Folders of checkpoints: a new one takes its name only when it is whole."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from accel_state.errors import ConfigurationError

from .manifest import Manifest
from .names import CheckpointError, is_file_of_a_state

# Names that nobody else gives: what has them is deleted.
PARTIAL, REPLACED, DELETED = "accel-partial", "accel-replaced", "accel-deleted"
_LOST_RACES = 10
# A process that looks for leftovers locks each of them for a moment.
_LOOKS, _PAUSE_SECONDS = 100, 0.02


class CheckpointFolder:
    """One checkpoint on its way to its name.

    It is written in ``.<name>.accel-partial`` beside its place. If an older one is at that place, it is moved to
    ``.<name>.accel-replaced`` for the moment between two renames; a process killed just then leaves it there, and
    :meth:`recover` puts it back. What is to be deleted is renamed to ``.<name>.accel-deleted`` first, so that it is
    never taken for a checkpoint.

    The folder that is being written is locked, so that what killed processes have left can be told from what others are
    writing.

    Args:
        target: the place.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        # Of a link, the folder behind it is what is replaced.
        self.target = Path(target).resolve()
        self.partial = aside(self.target, PARTIAL)
        self.replaced = aside(self.target, REPLACED)
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the folder to write into, and remove what killed processes have left beside it.

        Raises:
            ConfigurationError: the target is a file, the working directory or a mount point.
            CheckpointError: another process is saving to the same place.
        """
        if self.target.is_file():
            raise ConfigurationError(f"{self.target} is a file. Give a folder to save the state in.")
        if self.target == Path.cwd():
            raise ConfigurationError(
                f"{self.target} is the working directory, which cannot be replaced. Give a folder inside it."
            )
        if os.path.ismount(self.target):
            raise ConfigurationError(
                f"{self.target} is a mount point, which cannot be replaced. Give a folder inside it."
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._take_partial()
        self._recover()
        remove_leftovers(self.target.parent)

    def _take_partial(self) -> None:
        for _ in range(_LOST_RACES):
            self.partial.mkdir(exist_ok=True)
            self._lock = _lock_patiently(self.partial)
            if self._lock is None:
                raise CheckpointError(
                    f"another process is saving to {self.target} just now. Give each run a folder of its own."
                )
            # Another process may have taken this folder for a leftover between the two lines above.
            if _is_at(self._lock, self.partial):
                _empty(self.partial)
                return
            self.release()
        raise CheckpointError(
            f"{self.partial} could not be made: it vanished {_LOST_RACES} times. Is something else deleting it?"
        )

    def abandon(self) -> None:
        """Remove what was written, if anything; the older checkpoint, if there is one, is left as it was."""
        if self._lock is not None:  # otherwise it is another process that writes there
            shutil.rmtree(self.partial, ignore_errors=True)
            self.release()

    def release(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None

    def commit(self) -> None:
        """Put what was written, which is on the disk, in its place. Files in the folder that belong to no checkpoint
        stay.
        """
        if self.target.exists():
            os.rename(self.target, self.replaced)
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        sync(self.target.parent)
        self.release()
        self._clear_replaced()

    def recover(self) -> None:
        """Finish, or take back, a replacement that was interrupted; one that another process is in the middle of is
        left to it.
        """
        if self.replaced.exists() and not _is_being_written(self.target):
            self._recover()

    def _recover(self) -> None:
        if self.target.exists():
            self._clear_replaced()
            return
        with suppress(FileNotFoundError):  # there is none, or another process was quicker
            os.rename(self.replaced, self.target)

    @contextmanager
    def explaining_write_errors(self) -> Iterator[None]:
        """A block that writes; of what goes wrong in it with the disk, say how much space there is."""
        try:
            yield
        except Exception as error:
            if not _is_write_error(error):
                raise
            free = shutil.disk_usage(_existing(self.target.parent)).free
            raise CheckpointError(
                f"the state could not be written to {self.target}, with {free / 2**20:.1f} MiB free there "
                f"({type(error).__name__}: {error}). Make room, or save elsewhere; what was there before is unchanged."
            ) from error

    def _clear_replaced(self) -> None:
        # Another process may be doing the same: what is gone, it has moved or deleted.
        with suppress(FileNotFoundError):
            for entry in _foreign_entries(self.replaced):
                if not (self.target / entry.name).exists():
                    with suppress(FileNotFoundError):
                        os.rename(entry, self.target / entry.name)
            delete(self.replaced, aside(self.target, DELETED))


def aside(target: Path, kind: str) -> Path:
    """The hidden name beside a checkpoint's own."""
    return target.parent / f".{target.name}.{kind}"


def name_of(path: Path, kind: str) -> str | None:
    """The checkpoint's own name in a hidden one of some kind, or None."""
    hidden = path.name.startswith(".") and path.name.endswith(f".{kind}")
    return path.name[1 : -len(kind) - 1] or None if hidden else None


def delete(path: Path, temporary: Path) -> None:
    """Delete a checkpoint so that, if this is interrupted, what is left of it is not taken for one."""
    _remove(temporary)
    os.rename(path, temporary)
    _remove(temporary)


def _remove(folder: Path) -> None:
    """Remove a folder, if it is there; another process that clears up may be doing the same."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _lock_patiently(folder: Path) -> int | None:
    """As :func:`_lock`, but a lock that is held for a moment only is waited for."""
    for _ in range(_LOOKS):
        with suppress(FileNotFoundError):
            descriptor = _lock(folder)
            if descriptor is not None:
                return descriptor
        time.sleep(_PAUSE_SECONDS)
        folder.mkdir(exist_ok=True)
    return None


def _lock(folder: Path, where_locks_work: bool = False) -> int | None:
    """An open, locked folder; None if another process holds the lock.

    Args:
        folder: the folder.
        where_locks_work: return None also where folders cannot be locked, rather than one that is open only.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_locked = _lock_now(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if where_locks_work and not is_locked:
        os.close(descriptor)
        return None
    _drop_in_forked_processes()
    _held.add(descriptor)
    return descriptor


def _lock_now(descriptor: int) -> bool:
    """Lock, and say whether the system and the (network) file system have locks; BlockingIOError if another process
    holds this one.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, BlockingIOError):
            raise
        return False
    return True


def _unlock(descriptor: int) -> None:
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _held.discard(descriptor)
    os.close(descriptor)


# Locks of this process.
_held: set[int] = set()


@cache
def _drop_in_forked_processes() -> None:
    """Have processes that are forked from this one close its locks: a loader's worker that outlives it must not keep
    them.
    """
    os.register_at_fork(after_in_child=_drop_locks)


def _drop_locks() -> None:
    while _held:
        os.close(_held.pop())


def _is_locked_or_unknown(folder: Path) -> bool:
    """Whether a process may still be writing a folder."""
    descriptor = _lock_if_left(folder)
    if descriptor is None:
        return True
    # Also where a process has been forked meanwhile, which has the descriptor too: closing would leave it the lock.
    _unlock(descriptor)
    return False


def _lock_if_left(folder: Path) -> int | None:
    """A lock on what a killed process has left, and None of what another one may be writing. Nobody writes there while
    it is held.
    """
    try:
        descriptor = _lock(folder, where_locks_work=True)
    except OSError:
        return None
    # Before it was locked, another process may have cleared it away and begun to write under its name.
    if descriptor is not None and not _is_at(descriptor, folder):
        _unlock(descriptor)
        return None
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    opened = os.fstat(descriptor)
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return folder if folder.exists() else _existing(folder.parent)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes had begun to write in a folder, or to delete from it; and finish replacements they
    had begun.
    """
    for entry in list(parent.iterdir()):
        if name_of(entry, PARTIAL) and entry.is_dir():
            _set_aside(entry)
    for entry in list(parent.iterdir()):
        if name_of(entry, DELETED):
            # Not an error: another process may be clearing up too.
            shutil.rmtree(entry, ignore_errors=True)
    recover_all(parent)


def _set_aside(partial: Path) -> None:
    """Give what a killed process has left a name of what is deleted; what another process may be writing stays."""
    temporary = aside(partial.parent / str(name_of(partial, PARTIAL)), DELETED)
    if temporary.exists():
        shutil.rmtree(temporary, ignore_errors=True)
    descriptor = _lock_if_left(partial)
    if descriptor is None:
        return
    try:
        # While it is locked: whoever begins to write to this place meanwhile finds it gone, and makes another.
        # What cannot be renamed (another process has just set its own aside) is left for the next time.
        with suppress(OSError):
            os.rename(partial, temporary)
    finally:
        _unlock(descriptor)


def recover_all(parent: Path) -> None:
    """Finish, or take back, every interrupted replacement in a folder."""
    for entry in list(parent.iterdir()):
        name = name_of(entry, REPLACED)
        if name:
            CheckpointFolder(parent / name).recover()


def _is_being_written(target: Path) -> bool:
    partial = aside(target, PARTIAL)
    return partial.exists() and _is_locked_or_unknown(partial)


def _is_write_error(error: Exception) -> bool:
    """Whether an error is of the file system; torch and safetensors have their own kinds for that."""
    of_a_writer = (
        type(error).__name__ == "SafetensorError"
        or "inline_container" in str(error)
        or "PytorchStreamWriter" in str(error)
    )
    return isinstance(error, OSError) or of_a_writer


def _foreign_entries(folder: Path) -> list[Path]:
    """What lies in a checkpoint's folder and is no part of it."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        manifest = None
    own = {name.split("/")[0] for name in manifest.files} if manifest is not None else set()
    return [entry for entry in folder.iterdir() if entry.name not in own and not is_file_of_a_state(entry.name)]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
