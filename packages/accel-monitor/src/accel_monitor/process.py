"""What the operating system knows of this process. Torch-free."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from accel_state import env


def start_time(pid: int) -> float | None:
    """When a process of this machine started, in seconds since the epoch; None if it has ended."""
    # psutil knows the boot time in whole seconds only.
    with suppress(OSError, ValueError, IndexError):
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - uptime + _start_ticks(pid) / os.sysconf("SC_CLK_TCK")
    # Imported here, because `accel --help` imports this module, and on Linux it is never needed.
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def identity(pid: int) -> str | None:
    """Return a text that no other process of this machine has, also if it has the same id; None if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        return f"{pid}-{_start_ticks(pid)}"
    started = start_time(pid)
    return None if started is None else f"{pid}-{started}"


def _start_ticks(pid: int) -> int:
    # The name of the program, in parentheses, may contain anything.
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])


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
