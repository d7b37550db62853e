"""How many physical cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Physical cores within the CPU affinity of this process and the CPU quota of its container; at least 1.

    Args:
        cpus: folder in sysfs that has the topology of each CPU.
        quota: the control group's file with quota and period, in microseconds.
    """
    return max(1, min(_cores_in_affinity(cpus), _cores_in_quota(quota)))


def _cores_in_affinity(cpus: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = {_siblings(cpus, cpu) for cpu in allowed}
    return len(siblings)


def _siblings(cpus: Path, cpu: int) -> str:
    """The hardware threads that share a core with this one; two of the same core give the same text."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        # Some containers hide the topology: then every CPU counts as a core of its own.
        return str(cpu)


def _cores_in_quota(quota: Path) -> int:
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return (os.cpu_count() or 1) if limit == "max" else max(1, int(limit) // int(period))
