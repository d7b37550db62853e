"""What the operating system knows of this process. Torch-free."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> float | None:
    """When a process of this machine started, in seconds since the epoch; None if it has ended."""
    # psutil knows the boot time in whole seconds only.
    with suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # Imported here, because `accel --help` imports this module, and on Linux it is never needed.
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


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
