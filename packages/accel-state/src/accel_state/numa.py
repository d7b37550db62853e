"""Binds a process to the CPU cores near its device, so that host memory and the device are on the same NUMA node.

Works from ``/sys`` and psutil, for any device. The kernel knows the NUMA node of a device on the PCI bus; without one,
the NUMA nodes or their cores are divided evenly among the processes of the machine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from . import devices, environments
from .errors import ConfigurationError
from .options.core import CoreOptions

T = TypeVar("T")
_SYS = Path("/sys")
_logger = logging.getLogger(__name__)


@dataclass
class CPUInformation:
    """This process's rank in the run and on its node, as set by its launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's rank in the run.

    Raises:
        ConfigurationError: the launcher's variables contradict each other.
    """
    environment = environments.detect()
    return CPUInformation(
        environment.rank, environment.world_size, environment.local_rank, environment.local_world_size
    )


@functools.cache
def set_numa_affinity(
    local_process_index: int, verbose: bool | None = None, local_world_size: int | None = None
) -> None:
    """Call :func:`override_numa_affinity` once per process and local rank."""
    override_numa_affinity(local_process_index, verbose, local_world_size)


def override_numa_affinity(
    local_process_index: int, verbose: bool | None = None, local_world_size: int | None = None
) -> None:
    """Bind this process to the cores near its device, or to an even share of the cores if those are unknown.

    Only uses cores that the process was allowed before the first call (by a container or a batch system).

    Args:
        local_process_index: this process's rank on its node.
        verbose: log the cores at level INFO. None: if ACCELERATE_DEBUG_MODE is set.
        local_world_size: number of processes on its node. None: as the launcher's variables say.

    Raises:
        ConfigurationError: the operating system cannot bind a process, or the local rank does not exist.
    """
    ranks = local_world_size or get_cpu_distributed_information().local_world_size
    if not 0 <= local_process_index < max(ranks, 1):
        raise ConfigurationError(
            f"local_process_index={local_process_index} is not between 0 and the number of local processes {ranks}"
        )
    allowed = _cores_at_start()
    device = devices.detect(cpu=CoreOptions.read("cpu"))
    addresses = [device.pci_address(index) for index in range(min(ranks, device.device_count()))]
    near = [cores_near_pci(address) if address is not None else [] for address in addresses]
    cores = choose_cores(local_process_index, ranks, allowed, near, _numa_nodes(_SYS))
    psutil.Process().cpu_affinity(cores)
    if verbose if verbose is not None else CoreOptions.read("debug"):
        message = "local rank %d of %d is bound to %d of %d cores: %s"
        _logger.info(message, local_process_index, ranks, len(cores), len(allowed), cores)


def choose_cores(
    local_rank: int,
    local_world_size: int,
    allowed: Sequence[int],
    device_cores: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]],
) -> list[int]:
    """Choose the cores of one process, near its device or an even share; together a partition if there are enough."""
    allowed = sorted(set(allowed))
    near = [sorted(set(allowed) & set(cores)) for cores in device_cores]
    if local_rank < len(near) and near[local_rank]:
        # Devices of one NUMA node share its cores.
        sharing = [rank for rank, cores in enumerate(near) if cores == near[local_rank]]
        return _share(near[local_rank], sharing.index(local_rank), len(sharing))
    usable = [cores for node in nodes if (cores := sorted(set(node) & set(allowed)))]
    if sum(map(len, usable)) != len(allowed):  # some cores belong to no known node
        usable = [allowed]
    if local_world_size <= len(usable):
        return sorted(core for node in _share(usable, local_rank, local_world_size) for core in node)
    node_of = [rank * len(usable) // local_world_size for rank in range(local_world_size)]
    sharing = [rank for rank in range(local_world_size) if node_of[rank] == node_of[local_rank]]
    return _share(usable[node_of[local_rank]], sharing.index(local_rank), len(sharing))


def _share(items: Sequence[T], index: int, count: int) -> list[T]:
    """Return the index-th of ``count`` contiguous, nearly equal parts; with fewer items than parts, one shared item."""
    if len(items) < count:
        return [items[index % len(items)]]
    return list(items[index * len(items) // count : (index + 1) * len(items) // count])


@functools.cache
def _cores_at_start() -> tuple[int, ...]:
    """Return the cores allowed before this process was first bound, so that a second call divides all of them."""
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        raise ConfigurationError(
            "CPU affinity (--enable_cpu_affinity, ACCELERATE_CPU_AFFINITY) is not available: this operating system "
            "cannot bind a process to cores. Turn it off."
        )
    return tuple(process.cpu_affinity())


def cores_near_pci(address: str, sys_root: Path = _SYS) -> list[int]:
    """Cores of the NUMA node that a PCI device ("0000:3b:00.0") is attached to, ascending; empty if unknown."""
    directory = sys_root / "bus" / "pci" / "devices" / address.lower()
    node = _read(directory / "numa_node")
    if not node or int(node) < 0:
        return []
    return parse_core_list(
        _read(directory / "local_cpulist") or _read(sys_root / f"devices/system/node/node{int(node)}/cpulist")
    )


def _numa_nodes(sys_root: Path) -> list[list[int]]:
    """Cores of each NUMA node, without memory-only nodes."""
    nodes = sorted(sys_root.glob("devices/system/node/node[0-9]*"), key=lambda node: int(node.name[4:]))
    return [cores for node in nodes if (cores := parse_core_list(_read(node / "cpulist")))]


def parse_core_list(text: str) -> list[int]:
    """Parse the kernel's notation for a set of cores: ``"0-3,8,10-11"``."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _read(file: Path) -> str:
    """Return a file of sysfs; empty if it does not exist."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
