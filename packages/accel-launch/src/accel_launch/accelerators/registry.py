"""The accelerators of this machine: counted without torch where that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel_state.registry import Registry

from . import plug_in
from .base import AcceleratorKind

ACCELERATORS: Registry[type[AcceleratorKind]] = Registry(
    "accelerator", {"nvidia": "accel_launch.accelerators.nvidia:Nvidia", "amd": "accel_launch.accelerators.amd:Amd"}
)


@dataclass(frozen=True)
class VisibleDevices:
    """The accelerators that a process would see: their number, and the variable that selects among them."""

    count: int
    variable: str | None
    kind: str = "GPU"


def find_visible(environ: Mapping[str, str]) -> VisibleDevices:
    """Return the devices of the first vendor of which a process with these variables sees any; a count of 0 if none."""
    for name in ACCELERATORS:
        kind = ACCELERATORS.load(name)()
        count = kind.count_visible(environ)
        if count:
            return VisibleDevices(count, kind.visible_variables[0])
    count, variable, name = plug_in.count(environ)
    return VisibleDevices(count, variable, f"{name} device") if count else VisibleDevices(0, None)


def find_installed() -> tuple[int, tuple[str, ...]]:
    """Return the number of devices of the first vendor found, and the variables that can hide them."""
    for name in ACCELERATORS:
        kind = ACCELERATORS.load(name)()
        if count := kind.count_installed():
            return count, kind.visible_variables
    return 0, ()
