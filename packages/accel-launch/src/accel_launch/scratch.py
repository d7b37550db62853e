"""Directories for temporary files of a launcher, which the next launcher removes if this one was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "accel_launch_"
# Locked by the launcher as long as it lives, whatever ends it.
_OWNER = "owner.lock"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory that is removed at the end; remove those of launchers that were killed first."""
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = None
    try:
        lock = _take(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _take(directory: Path) -> int | None:
    """Mark a new directory as one that has an owner, for as long as this process lives."""
    descriptor = os.open(directory / f"{_OWNER}.new", os.O_CREAT | os.O_RDWR, 0o600)  # not inherited by what it starts
    if not _locked(descriptor):
        os.close(descriptor)
        return None
    # Only now, so that a file of this name is never seen without its lock.
    os.replace(directory / f"{_OWNER}.new", directory / _OWNER)
    return descriptor


def _remove_abandoned() -> None:
    """Remove the directories of this user whose launcher has ended; others, and those in the making, stay."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if directory.is_symlink() or not hasattr(os, "getuid") or directory.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(directory / _OWNER, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except OSError:  # it is gone, or has no such file
            continue
        try:
            if _locked(descriptor):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock of a file; False if another process has it, or where files cannot be locked."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
