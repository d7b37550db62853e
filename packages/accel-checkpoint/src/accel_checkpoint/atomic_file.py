"""Writing single files so that no reader sees a partly written one. Torch-free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from accel_state.paths import as_path


def write_atomically(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Write a file under a temporary name, and rename it when it is complete and on the disk."""
    target = as_path("path", path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(descriptor)
    umask = os.umask(0)
    os.umask(umask)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~umask)  # files of mkstemp are private to their owner
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
