"""The number of physical cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Physical cores within the CPU affinity of this process and the CPU quota of its container; at least 1."""
    return max(1, min(_cores_in_affinity(cpus), _cores_in_quota(quota)))


def _cores_in_affinity(cpus: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return len({_siblings(cpus, cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpus: Path, cpu: int) -> str:
    """The hardware threads of this CPU's core, as text."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        # Some containers hide the topology: then every CPU counts as a core.
        return str(cpu)


def _cores_in_quota(quota: Path) -> int:
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return (os.cpu_count() or 1) if limit == "max" else max(1, int(limit) // int(period))
