"""What the launcher must know of a kind of accelerator, without torch and without touching a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class AcceleratorKind(ABC):
    """Devices of one maker.

    Attributes:
        visible_variables: variables that limit which devices a process sees; the first is the one that ``--gpu_ids``
            sets.
    """

    visible_variables: tuple[str, ...]

    @abstractmethod
    def count_installed(self) -> int:
        """Devices of this machine (of this container), whatever a variable hides."""

    def count_visible(self, environ: Mapping[str, str]) -> int:
        """Devices that a process with these variables sees."""
        limits = [environ[name] for name in self.visible_variables if name in environ]
        # Without a limiting variable, or with one that hides nothing, every device counts; and counting may start a
        # program.
        if any(not limit.strip() for limit in limits):
            return 0
        installed = self.count_installed()
        return min([installed, *(count_entries(limit, installed) for limit in limits)])


def count_entries(limit: str, installed: int) -> int:
    """Devices that a list such as ``0,2`` or ``GPU-8c1d...`` leaves visible: it ends at the first that does not exist."""
    count = 0
    for entry in (part.strip() for part in limit.split(",")):
        index = int(entry) if entry.lstrip("-").isdigit() else None
        if not entry or (index is not None and not 0 <= index < installed):
            break
        count += 1
    return count
