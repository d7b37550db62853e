"""Measures the training loop of an Accelerator. ``accel`` finds :func:`watch` through the entry point group
``accel.monitors``; this package does not import it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from accel_state import devices, env
from accel_state.errors import ConfigurationError

from .monitor import Monitor


class AcceleratorMonitor:
    """The monitor that an Accelerator holds."""

    def __init__(self, accelerator: Any, launched: bool) -> None:
        device = accelerator.device
        known = devices.of(device)
        if accelerator.strategy.uses_engine or (known is not None and known.collectives != "torch"):
            raise ConfigurationError(
                f"monitor=True does not measure {type(accelerator.strategy).__name__} yet, whose steps are not of "
                "a torch optimizer. Leave it out, or train with one process, DDP or FSDP."
            )
        replica = env.read_int("ACCELERATE_FT_REPLICA")
        self._accelerator = accelerator
        self._seen: list[Any] = []
        self._monitor = Monitor(
            accelerator.project_dir or ".",
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            replica=replica,
            device=device,
            launcher=os.getppid() if launched else None,
        )
        accelerator.backward = self._monitor.timed_backward(accelerator.backward)

    def prepared(self) -> None:
        """Measure the objects that were prepared since the last call."""
        prepared = self._accelerator.prepared
        for name in ("model", "optimizer", "loader"):
            for obj in getattr(prepared, f"{'dataloader' if name == 'loader' else name}s"):
                if not any(obj is seen for seen in self._seen):
                    self._seen.append(obj)
                    self._monitor.watch(**{name: obj}, marks_backward=False)

    def part(self, name: str) -> AbstractContextManager[None]:
        """A block whose time counts as "saving", "loading" or "evaluation"."""
        return self._monitor.part(name)

    def loaded(self) -> None:
        """Report a state that was loaded."""
        optimizers = self._accelerator.prepared.optimizers
        self._monitor.loaded(optimizers[0].steps_taken if optimizers else 0)

    def finish(self) -> None:
        """Write the last counters and end the measurement."""
        if "backward" in vars(self._accelerator):
            del self._accelerator.backward
        self._monitor.finish()


def watch(accelerator: Any, launched: bool) -> AcceleratorMonitor:
    """Measure an Accelerator.

    Args:
        accelerator: an Accelerator that has resolved its arguments.
        launched: whether ``accel launch --monitor`` started this process.

    Raises:
        ConfigurationError: its strategy or device cannot be measured, or its project directory cannot be used.
    """
    return AcceleratorMonitor(accelerator, launched)
