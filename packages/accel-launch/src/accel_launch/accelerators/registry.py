"""Every kind of accelerator that can be counted without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel_state.registry import Registry

from .base import AcceleratorKind

ACCELERATORS: Registry[type[AcceleratorKind]] = Registry(
    "accelerator", {"nvidia": "accel_launch.accelerators.nvidia:Nvidia", "amd": "accel_launch.accelerators.amd:Amd"}
)


@dataclass(frozen=True)
class Visible:
    """The accelerators that a process would see.

    Attributes:
        count: how many.
        variable: the variable that chooses among them.
    """

    count: int
    variable: str | None


def find_visible(environ: Mapping[str, str]) -> Visible:
    """The first kind of which a process with these variables sees any device; a count of 0 where there is none."""
    for name in ACCELERATORS:
        kind = ACCELERATORS.load(name)()
        count = kind.count_visible(environ)
        if count:
            return Visible(count, kind.visible_variables[0])
    return Visible(0, None)


def find_installed() -> tuple[int, tuple[str, ...]]:
    """The devices that the machine has of the first kind that it has any of, whatever hides them, and the variables
    that can.
    """
    for name in ACCELERATORS:
        kind = ACCELERATORS.load(name)()
        if count := kind.count_installed():
            return count, kind.visible_variables
    return 0, ()
