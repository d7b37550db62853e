"""The counters of a process in shared memory of its machine, which survive the process.

A step writes a record of 200 bytes in memory that the kernel keeps when the process is killed. The next attempt on this
machine finds in it the last step that the killed process completed. Torch-free.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .parts import NAMES
from .recorder import Recorder

PREFIX = "accel_monitor_"
_MAGIC = b"ACCELMON"
_FORMAT = struct.Struct(f"<8sQdQQQ{len(NAMES)}dQ")
_SIZE = 4096


def _directory() -> str:
    # Memory, where there is such a file system: its pages exist once written, so that a full disk cannot end the
    # process with SIGBUS, as it could with a mapped file on a disk.
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


class LiveRecord:
    """Writes the counters of a recorder after each step.

    Raises:
        OSError: there is no room for the file.
    """

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix=PREFIX, dir=_directory())
        try:
            if os.write(descriptor, bytes(_SIZE)) < _SIZE:
                raise OSError(f"{self.path}: only a part of {_SIZE} bytes could be written")
            self._memory = mmap.mmap(descriptor, _SIZE)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)
        self._count = 0

    def write(self, recorder: Recorder) -> None:
        """Write the counters; called by the loop after each step."""
        self._count = count = self._count + 1
        _FORMAT.pack_into(
            self._memory,
            0,
            _MAGIC,
            count,
            recorder.since - recorder.start,
            recorder.step,
            recorder.samples,
            recorder.tokens,
            *recorder.seconds,
            count,
        )

    def remove(self) -> None:
        """Delete the file; the process has written its last line."""
        with suppress(OSError):
            os.unlink(self.path)


def read_live(path: str) -> dict[str, Any] | None:
    """The fields of a sample (see :mod:`accel_monitor.records`) in a record; None if there is none that is whole."""
    if not _is_ours(path):
        return None
    try:
        content = Path(path).read_bytes()[: _FORMAT.size]
    except OSError:
        return None
    if len(content) < _FORMAT.size:
        return None
    magic, count, at, step, samples, tokens, *seconds, check = _FORMAT.unpack(content)
    # The process may have been killed, or be writing, between the first byte and the last.
    if magic != _MAGIC or count != check:
        return None
    return {"at": at, "step": step, "step_at": at, "samples": samples, "tokens": tokens, "parts": seconds}


def remove_live(path: str) -> None:
    """Delete the record of a process that has ended."""
    if _is_ours(path):
        with suppress(OSError):
            os.unlink(path)


def _is_ours(path: str) -> bool:
    """Whether a path, which stands in a file that others may have written, is a record of this user."""
    directory, name = os.path.split(path)
    if not name.startswith(PREFIX) or directory not in ("/dev/shm", tempfile.gettempdir()):
        return False
    try:
        status = os.lstat(path)
    except OSError:
        return False
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISREG(status.st_mode) and own
