"""The cores that this process may use, and how many processes a machine is asked to run on them."""

from __future__ import annotations

import os
from pathlib import Path

from accel_state.errors import ConfigurationError

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_PROCESSES_PER_CPU = 8
_ALWAYS_ALLOWED = 64


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Physical cores within the CPU affinity of this process and the CPU quota of its container; at least 1."""
    return max(1, min(_cores_in_affinity(cpus), _cores_in_quota(quota)))


def check_process_count(processes: int, devices: int, where: str, override: str) -> None:
    """Raise ConfigurationError for far more processes on this machine than it has CPUs and devices.

    Args:
        processes: processes to start here.
        devices: visible accelerators.
        where: the setting that asks for them, for the message.
        override: what allows any number, for the message.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = max(_PROCESSES_PER_CPU * cpus, _ALWAYS_ALLOWED, devices)
    if processes > limit:
        machine = f"{cpus} CPU(s)" + (f" and {devices} accelerator(s)" if devices else "")
        raise ConfigurationError(
            f"{where}: {processes} processes on this machine, which has {machine}, are more than {limit}. Start fewer, "
            f"or {override} to start them anyway."
        )


def default_cpu_processes(nodes: Path = _NODES) -> int:
    """Return the default number of processes on this machine's CPUs: one per NUMA node, and at least two."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    usable = [node for node in nodes.glob("node[0-9]*") if any((node / f"cpu{cpu}").exists() for cpu in cpus)]
    return max(2, len(usable))


def _cores_in_affinity(cpus: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        import psutil

        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return len({_siblings(cpus, cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpus: Path, cpu: int) -> str:
    """Return the hardware threads of this CPU's core, as text."""
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
