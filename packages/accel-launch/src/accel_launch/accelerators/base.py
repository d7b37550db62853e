"""Counts the devices of a vendor without torch and without opening a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class AcceleratorKind(ABC):
    """Devices of one vendor.

    Attributes:
        visible_variables: variables that restrict which devices a process sees; ``--gpu_ids`` sets the first.
        kubernetes_resource: the name of these devices as a resource of Kubernetes.
    """

    visible_variables: tuple[str, ...]
    kubernetes_resource: str

    @abstractmethod
    def count_installed(self) -> int:
        """Devices of this machine or container, including hidden ones."""

    def count_visible(self, environ: Mapping[str, str]) -> int:
        """Devices that a process with these variables sees."""
        limits = [environ[name] for name in self.visible_variables if name in environ]
        if any(not limit.strip() for limit in limits):
            return 0  # without counting, which may start a program
        installed = self.count_installed()
        return min([installed, *(count_entries(limit, installed) for limit in limits)])


def count_entries(limit: str, installed: int) -> int:
    """Devices that a list such as ``0,2`` or ``GPU-8c1d...`` makes visible: up to the first that does not exist."""
    count = 0
    for entry in (part.strip() for part in limit.split(",")):
        index = int(entry) if entry.lstrip("-").isdigit() else None
        if not entry or (index is not None and not 0 <= index < installed):
            break
        count += 1
    return count
