"""The monitor of an Accelerator: nothing by default, or what a distribution such as accel-monitor registers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accel_state.errors import MissingDependencyError
from accel_state.options import CoreOptions
from accel_state.registry import Registry

MONITORS: Registry[Callable[[Any, bool], Any]] = Registry("monitor", {}, "accel.monitors")


class NoMonitor:
    """The interface of a monitor, which does nothing here.

    Attributes:
        replaced: names of the Accelerator's methods that it has replaced by attributes of the object.
    """

    replaced: tuple[str, ...] = ()

    def prepared(self) -> None:
        """Objects were prepared."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a block whose time belongs to "saving", "loading" or "evaluation"."""
        return nullcontext()

    def loaded(self) -> None:
        """Note that a state was loaded."""

    def finish(self) -> None:
        """Training has ended."""


NO_MONITOR = NoMonitor()


def start(monitor: bool | None, core: CoreOptions, accelerator: Any) -> NoMonitor:
    """Return the monitor of an Accelerator.

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
        return NO_MONITOR
    if "default" not in MONITORS:
        raise MissingDependencyError(
            f"{'monitor=True' if monitor else '--monitor'} needs the distribution accel-monitor. Install it with: "
            "pip install 'accel[monitor]'"
        )
    started: NoMonitor = MONITORS.load("default")(accelerator, launched)
    return started
