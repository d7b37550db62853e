"""When a process of this machine started, and a name that no other process has. Torch-free."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None if it has ended."""
    # psutil knows the boot time in whole seconds only.
    with suppress(OSError, ValueError, IndexError):
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - uptime + start_ticks(pid) / os.sysconf("SC_CLK_TCK")
    # Imported here, because `accel --help` imports this module, and on Linux it is never needed.
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def identity(pid: int) -> str | None:
    """Return a text that no other process of this machine has, also if it has the same id; None if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        return f"{pid}-{start_ticks(pid)}"
    started = start_time(pid)
    return None if started is None else f"{pid}-{started}"


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot, which does not change when the clock is set.

    Raises:
        OSError: the process has ended, or this is not Linux.
    """
    # The name of the program, in parentheses, may contain anything.
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
