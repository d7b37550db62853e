"""The monitor of an Accelerator: none by default, or what a distribution such as accel-monitor registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel_state.errors import MissingDependencyError
from accel_state.options import CoreOptions
from accel_state.registry import Registry

MONITORS: Registry[Callable[[Any, bool], Any]] = Registry("monitor", {}, "accel.monitors")
"""What makes a monitor of an Accelerator, which calls its methods ``prepared()``, ``part(name)`` (a block whose time
belongs to "saving", "loading" or "evaluation"), ``loaded()`` and ``finish()``. Its ``replaced`` names the Accelerator's
methods that it replaces by attributes of the object."""


def start(monitor: bool | None, core: CoreOptions, accelerator: Any) -> Any:
    """Return the monitor of an Accelerator; None if it is not measured.

    Args:
        monitor: whether it is measured; None leaves it to the launcher (``accel launch --monitor``).
        core: the launcher's options.
        accelerator: the Accelerator.

    Raises:
        MissingDependencyError: no monitor is installed.
        ConfigurationError: what the Accelerator does cannot be measured.
    """
    launched = core.monitor or core.monitor_port is not None
    if not (launched if monitor is None else monitor):
        return None
    if "default" not in MONITORS:
        raise MissingDependencyError(
            f"{'monitor=True' if monitor else '--monitor'} needs the distribution accel-monitor. Install it with: "
            "pip install 'accel[monitor]'"
        )
    return MONITORS.load("default")(accelerator, launched)
