"""Atomic directories: a checkpoint gets its name only when it is complete and on the disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.paths import refuse_link

from .manifest import FileRecord, Manifest
from .names import CheckpointError, is_checkpoint_file

# Hidden names next to a checkpoint's own: while it is written (and locked, which distinguishes it from what a killed
# process has left), an older one between the two renames of `commit` (which `recover` undoes), and one to delete.
PARTIAL, REPLACED, DELETED = "accel-partial", "accel-replaced", "accel-deleted"
_MAX_LOST_RACES = 10
# A process that looks for leftovers locks each of them for a moment; wait for that.
_LOCK_ATTEMPTS, _PAUSE_SECONDS = 100, 0.02
_NOT_SHARED = (
    "this rank does not see {}, which another rank made. Save to a file system that all nodes share, or set "
    "ProjectConfiguration(save_on_each_node=True)."
)


class CheckpointDirectory:
    """A checkpoint that is being written."""

    shared = True  # whether ranks write into one directory

    def __init__(self, target: str | os.PathLike[str], save_id: str = "") -> None:
        self.save_id = save_id  # only saves into a store need one
        self.target: Path = Path(target).resolve()
        self.partial: Path = aside(self.target, PARTIAL)
        self.replaced: Path = aside(self.target, REPLACED)
        self._lock: int | None = None

    def begin(self, existing: str = "", ranks: int = 1) -> None:
        """Make the directory to write into, and remove what killed processes have left next to it.

        Args:
            existing: the error if there is a checkpoint of this name already; "" replaces it.
            ranks: how many save it. They may be staging already, and other machines may not see their locks.
        """
        if existing and self.target.exists():
            raise ConfigurationError(existing)
        if self.target.is_file():
            raise ConfigurationError(f"{self.target} is a file. Give a directory to save the state in.")
        if self.target == Path.cwd() or self.target.is_mount():
            what = "a mount point" if self.target.is_mount() else "the working directory"
            raise ConfigurationError(f"{self.target} is {what}, which cannot be replaced. Give a directory inside it.")
        for path in (self.partial, self.replaced, aside(self.target, DELETED)):
            refuse_link(path)
        self._lock_partial()
        if self.replaced.exists():
            _finish_replacement(self.target, self.replaced)
        remove_leftovers(self.target.parent, skip=self.partial, ranks=ranks)

    def join(self) -> None:
        """Prepare for writing where another rank has begun."""
        if not self.partial.is_dir():
            raise CheckpointError(_NOT_SHARED.format(self.partial))

    def stage(self, rank: int) -> None:
        """Prepare for writing without waiting for :meth:`begin`: into a directory of this rank's own.

        It is hidden and locked like the one that :meth:`take` moves its files to, so that what a killed rank has left
        is removed by the next save.
        """
        self.partial = aside(self.target.parent / f"{self.target.name}.rank{rank}", PARTIAL)
        refuse_link(self.partial)
        self._lock_partial()

    def take(self, staged: Path) -> None:
        """Move the files of another rank's directory into this one."""
        if not staged.is_dir():
            raise CheckpointError(_NOT_SHARED.format(staged))
        _merge(staged, self.partial)

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if a file that a rank has written is not here."""
        for name in names:
            if not (self.partial / name).is_file():
                raise CheckpointError(_NOT_SHARED.format(self.partial / name))

    def known(self, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return digests of files of that size: other nodes may have their own, and hooks may change files."""
        known = {}
        for name, record in records.items():
            file = self.partial / name
            if file.is_file() and file.stat().st_size == record.size:
                known[name] = record
        return known

    def _lock_partial(self) -> None:
        """Make and lock the directory to write into, which is empty then."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        lost_races = 0
        for _ in range(_LOCK_ATTEMPTS):
            self.partial.mkdir(exist_ok=True)
            with suppress(FileNotFoundError, NotADirectoryError):
                self._lock = _lock(self.partial)
            refuse_link(self.partial)
            if self._lock is None:
                time.sleep(_PAUSE_SECONDS)
                continue
            # Another process may have taken the directory for a leftover before it was locked.
            if _is_at(self._lock, self.partial):
                for entry in self.partial.iterdir():
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
                return
            self.release()
            lost_races += 1
            if lost_races == _MAX_LOST_RACES:
                raise CheckpointError(
                    f"{self.partial} was deleted {lost_races} times while it was made. Is another program deleting it?"
                )
        raise CheckpointError(f"another save to {self.target} is in progress. Give each run its own directory.")

    def abandon(self) -> None:
        """Remove what was written; an older checkpoint stays as it was."""
        if self._lock is not None:  # otherwise another process writes there
            shutil.rmtree(self.partial, ignore_errors=True)
            self.release()

    def release(self) -> None:
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None

    def commit(self, manifest: Manifest | None = None) -> None:
        """Rename what was written, which is on the disk with its manifest, to its final name."""
        del manifest
        replaces = self.target.exists()
        if replaces:
            os.rename(self.target, self.replaced)
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        sync(self.target.parent)
        self.release()
        if replaces:
            _clear_replaced(self.target, self.replaced)

    @contextmanager
    def explaining_write_errors(self) -> Iterator[None]:
        """Raise the block's file system errors as CheckpointError with what to do."""
        try:
            yield
        except Exception as error:
            missing = error.filename if isinstance(error, FileNotFoundError) else None
            deleted = isinstance(missing, str) and Path(missing).is_relative_to(self.partial)
            if deleted or not self.partial.exists():
                raise CheckpointError(
                    f"{self.partial} was deleted or replaced while the state was written there "
                    f"({type(error).__name__}: {error}). Another run or Accelerator that saves to {self.target}, or "
                    "another program, did this. Give each run its own directory."
                ) from error
            of_a_writer = (
                type(error).__name__ == "SafetensorError"
                or "inline_container" in str(error)
                or "PytorchStreamWriter" in str(error)
            )
            if not (isinstance(error, OSError) or of_a_writer):
                raise
            directory = self.target.parent
            while not directory.exists():
                directory = directory.parent
            free = shutil.disk_usage(directory).free
            raise CheckpointError(
                f"the state could not be written to {self.target}, with {free / 2**20:.1f} MiB free there "
                f"({type(error).__name__}: {error}). Free some space, or save elsewhere; an older checkpoint there is "
                "unchanged."
            ) from error


def _merge(source: Path, target: Path) -> None:
    """Move everything in a directory into another one."""
    for entry in list(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and not entry.is_symlink() and place.is_dir():
            _merge(entry, place)
        else:
            shutil.move(entry, place)


def aside(target: Path, kind: str) -> Path:
    """Return the hidden name of some kind next to a checkpoint."""
    return target.parent / f".{target.name}.{kind}"


def name_of(path: Path, kind: str) -> str | None:
    """Return the checkpoint's own name in a hidden name of some kind, or None."""
    hidden = path.name.startswith(".") and path.name.endswith(f".{kind}")
    return path.name[1 : -len(kind) - 1] or None if hidden else None


def recover(target: Path) -> None:
    """Finish or undo an interrupted replacement, unless another process is writing to the same path.

    Raises:
        LinkError: one of the hidden directories is a symbolic link.
    """
    target = target.resolve()
    replaced = aside(target, REPLACED)
    if not os.path.lexists(replaced):
        return
    refuse_link(replaced)
    partial = aside(target, PARTIAL)
    refuse_link(partial)
    if partial.exists():
        descriptor = _lock_leftover(partial)
        if descriptor is None:
            return
        # Also unlocked where a process was forked meanwhile, which has the descriptor too.
        _unlock(descriptor)
    _finish_replacement(target, replaced)


def recover_all(parent: Path) -> None:
    """Finish or undo every interrupted replacement in a directory; links are left as they are."""
    for entry in list(parent.iterdir()):
        name = name_of(entry, REPLACED)
        if name and not entry.is_symlink() and not aside(parent / name, PARTIAL).is_symlink():
            recover(parent / name)


def _finish_replacement(target: Path, replaced: Path) -> None:
    if target.exists():
        _clear_replaced(target, replaced)
        return
    with suppress(FileNotFoundError):  # another process was quicker
        os.rename(replaced, target)


def _clear_replaced(target: Path, replaced: Path) -> None:
    """Delete a replaced checkpoint, and move the other files in its directory to the new one."""
    # Another process may be doing the same: a missing file has been moved or deleted by it.
    with suppress(FileNotFoundError):
        for entry in _foreign_entries(replaced):
            if not (target / entry.name).exists():
                with suppress(FileNotFoundError):
                    os.rename(entry, target / entry.name)
        delete(replaced, aside(target, DELETED))


def _foreign_entries(directory: Path) -> list[Path]:
    """Files in a checkpoint's directory that are not part of the checkpoint."""
    try:
        manifest = Manifest.read(directory)
    except CheckpointError:
        manifest = None
    names = {name.split("/")[0] for name in manifest.files} if manifest is not None else set()
    return [entry for entry in directory.iterdir() if entry.name not in names and not is_checkpoint_file(entry.name)]


def delete(path: Path, temporary: Path) -> None:
    """Delete a checkpoint; if this is interrupted, what is left is not mistaken for one.

    Raises:
        LinkError: one of the paths is a symbolic link.
    """
    refuse_link(path)
    refuse_link(temporary)
    _remove(temporary)
    os.rename(path, temporary)
    _remove(temporary)


def _remove(directory: Path) -> None:
    while directory.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)


def remove_leftovers(parent: Path, skip: Path | None = None, ranks: int = 1) -> int:
    """Remove what killed processes have left in a directory, and finish the replacements they had begun.

    Args:
        parent: the directory.
        skip: the directory that a save writes into, which is left alone.
        ranks: how many save there; what they stage is left alone too.

    Returns:
        How many there were.
    """
    count = 0
    # Two passes: the first renames what the second deletes.
    for kind in (PARTIAL, DELETED):
        for entry in list(parent.iterdir()):
            if entry == skip or not (name := name_of(entry, kind)) or entry.is_symlink():
                continue
            owner, _, rank = name.rpartition(".rank")
            if rank.isdecimal() and int(rank) < ranks and aside(parent / owner, kind) == skip:
                continue
            if kind == DELETED:
                # Another process may be deleting it too.
                shutil.rmtree(entry, ignore_errors=True)
                count += 1
            elif entry.is_dir():
                _set_aside(entry)
    for entry in list(parent.iterdir()):
        if entry.name.endswith(REPLACED):
            recover_all(parent)
            return count + 1
    return count


def _set_aside(partial: Path) -> None:
    """Rename what a killed process has left for deletion, unless a process is writing there."""
    temporary = aside(partial.parent / str(name_of(partial, PARTIAL)), DELETED)
    if temporary.exists():
        shutil.rmtree(temporary, ignore_errors=True)
    descriptor = _lock_leftover(partial)
    if descriptor is None:
        return
    try:
        # While it is locked: a process that begins to write to this path meanwhile finds it gone, and makes another.
        # If it cannot be renamed (another process has just done so), it is left for the next time.
        with suppress(OSError):
            os.rename(partial, temporary)
    finally:
        _unlock(descriptor)


# Locks. Descriptors of this process's locks, which forked processes close: a loader's worker may outlive the lock.
_held: set[int] = set()


def _drop_locks() -> None:
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_locks)


def _lock(directory: Path, require_lock: bool = False) -> int | None:
    """Return the descriptor of a directory that is now locked; None if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0))
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if require_lock or isinstance(error, BlockingIOError):
            os.close(descriptor)
            return None
    _held.add(descriptor)
    return descriptor


def _unlock(descriptor: int) -> None:
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
    _held.discard(descriptor)
    os.close(descriptor)


def _lock_leftover(directory: Path) -> int | None:
    """Lock what a killed process has left; None if a process may be writing there."""
    try:
        descriptor = _lock(directory, require_lock=True)
    except OSError:
        return None
    # Before it was locked, another process may have deleted it and begun to write under its name.
    if descriptor is not None and not _is_at(descriptor, directory):
        _unlock(descriptor)
        return None
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    opened = os.fstat(descriptor)
    try:
        current = path.lstat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
