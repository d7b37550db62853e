"""The counters of a process in shared memory of its machine, which survive the process.

The kernel keeps this memory when the process is killed. The next attempt on this machine finds in it the last step that
the killed process completed, and the seconds by part up to the last quarter of a second. Torch-free.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .counters import NUMBERS, load
from .recorder import Recorder

PREFIX = "accel_monitor_"
_MAGIC = b"ACCELMO3"
_HEAD = len(_MAGIC)
_SIZE = _HEAD + 8 * NUMBERS


def _directory() -> str:
    # Memory, where there is such a file system: its pages exist once written, so that a full disk cannot end the
    # process with SIGBUS, as it could with a mapped file on a disk.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def share(recorder: Recorder) -> str:
    """Let a recorder keep its counters in shared memory from now on; returns the path of its record.

    Raises:
        OSError: there is no room for the file.
    """
    descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=_directory())
    try:
        if os.write(descriptor, bytes(_SIZE)) < _SIZE:
            raise OSError(f"{path}: only a part of {_SIZE} bytes could be written")
        memory = mmap.mmap(descriptor, _SIZE)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    memory[:_HEAD] = _MAGIC
    recorder.use(memoryview(memory)[_HEAD:_SIZE].cast("d"))
    return path


def read_live(path: str) -> dict[str, Any] | None:
    """Return the fields of a sample (see :mod:`accel_monitor.records`) in a record.

    None if there is none that is whole.
    """
    if not _is_ours(path):
        return None
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    if len(content) != _SIZE or not content.startswith(_MAGIC):
        return None
    counters = load(memoryview(content)[_HEAD:].cast("d"))
    if counters is None:
        return None
    return {
        "at": counters.since - counters.start,
        "step_at": None if counters.step_at is None else counters.step_at - counters.start,
        "parts": counters.seconds,
        "step": counters.step,
        "samples": counters.samples,
        "tokens": counters.tokens,
    }


def remove_live(path: str) -> None:
    """Delete the record of a process that has ended."""
    if _is_ours(path):
        with suppress(OSError):
            os.unlink(path)


def _is_ours(path: str) -> bool:
    """Return True if a path, which stands in a file that others may have written, is a record of this user."""
    directory, name = os.path.split(path)
    if not name.startswith(PREFIX) or directory not in ("/dev/shm", tempfile.gettempdir()):
        return False
    try:
        status = os.lstat(path)
    except OSError:
        return False
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISREG(status.st_mode) and own
