"""The monitor of an Accelerator: none by default, or what a distribution such as accel-monitor registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_state.errors import MissingDependencyError
from accel_state.registry import Registry

MONITORS: Registry[Callable[[Any, bool], Any]] = Registry("monitor", {}, "accel.monitors")
"""What makes a monitor of an Accelerator, which calls its methods ``prepared()``, ``part(name)`` (a block whose time
belongs to "saving", "loading" or "evaluation"), ``loaded()`` and ``finish()``. Its ``replaced`` names the Accelerator's
methods that it replaces by attributes of the object."""


def start(accelerator: Any, monitor: bool | None, launched: bool) -> Any:
    """Return the monitor of an Accelerator.

    Args:
        accelerator: the Accelerator.
        monitor: whether the script asks for it.
        launched: whether the launcher does (``accel launch --monitor``).

    Raises:
        MissingDependencyError: no monitor is installed.
        ConfigurationError: what the Accelerator does cannot be measured.
    """
    if "default" not in MONITORS:
        raise MissingDependencyError(
            f"{'monitor=True' if monitor else '--monitor'} needs the distribution accel-monitor. Install it with: "
            "pip install 'accel[monitor]'"
        )
    return MONITORS.load("default")(accelerator, launched)
