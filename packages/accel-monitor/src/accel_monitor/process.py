"""What the operating system knows of this process. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from accel_state import env


def agent() -> int | None:
    """Return the parent process if it is an agent of ``accel launch`` or torchrun, which starts this one again.

    A single process has none: ``accel launch`` becomes its script, whose parent may be a shell that is open for days.
    """
    return os.getppid() if env.read_str("TORCHELASTIC_RUN_ID") else None


def scheduled(thread: int) -> tuple[float, float] | None:
    """Return seconds that a thread of this process ran, and that it was ready to run but had no core; None if unknown.

    Args:
        thread: its native id.
    """
    try:
        ran, queued = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(queued) / 1e9
