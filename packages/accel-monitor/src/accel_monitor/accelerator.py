"""Measures the training loop of an Accelerator. ``accel`` finds :func:`watch` through the entry point group
``accel.monitors``; this package does not import it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_state import devices, env
from accel_state.errors import ConfigurationError
from accel_state.hardware import profile_of

from . import process
from .monitor import Monitor

COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "wait_for_everyone")
"""Methods in which a rank waits for the others."""
REPLACED = ("backward", "clip_grad_norm_", "log", *COLLECTIVES)
"""Methods of an Accelerator that are measured: attributes of the object while the monitor runs."""


class AcceleratorMonitor:
    """The monitor that an Accelerator holds.

    Attributes:
        replaced: names of the Accelerator's methods that it has replaced, which are no part of a pickle.
    """

    replaced = REPLACED

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
            peak_flops=_peak_flops(device, str(accelerator.mixed_precision)),
            launcher=process.agent() if launched else None,
        )
        accelerator.backward = self._monitor.timed_backward(accelerator.backward)
        accelerator.clip_grad_norm_ = self._monitor.timed_clipping(accelerator.clip_grad_norm_)
        accelerator.log = self._monitor.logging(accelerator.log)
        if accelerator.num_processes > 1:
            for name in COLLECTIVES:
                setattr(accelerator, name, self._monitor.timed_waiting(getattr(accelerator, name)))

    def prepared(self) -> None:
        """Measure the objects that were prepared since the last call."""
        prepared = self._accelerator.prepared
        for name in ("model", "optimizer", "loader"):
            for obj in getattr(prepared, f"{'dataloader' if name == 'loader' else name}s"):
                if not any(obj is seen for seen in self._seen):
                    self._seen.append(obj)
                    self._monitor.watch(**{name: obj}, marks_backward=False)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time counts as "saving", "loading" or "evaluation"."""
        return self._monitor.part(name)

    def loaded(self) -> None:
        """Report a state that was loaded."""
        optimizers = self._accelerator.prepared.optimizers
        self._monitor.loaded(optimizers[0].steps_taken if optimizers else 0)

    def finish(self) -> None:
        """Write the last counters and end the measurement."""
        for name in REPLACED:
            vars(self._accelerator).pop(name, None)
        self._monitor.finish()


def _peak_flops(device: torch.device, precision: str) -> float | None:
    """Return what the device can compute in a precision; None if it is not known."""
    module = getattr(torch, device.type, None)
    name_of = getattr(module, "get_device_name", None)
    profile = None if name_of is None else profile_of(str(name_of(device)))
    if profile is None:
        return None
    if precision == "no":
        precision = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return profile.flops.get(precision)


def watch(accelerator: Any, launched: bool) -> AcceleratorMonitor:
    """Measure an Accelerator.

    Args:
        accelerator: an Accelerator that has resolved its arguments.
        launched: whether ``accel launch --monitor`` started this process.

    Raises:
        ConfigurationError: its strategy or device cannot be measured, or its project directory cannot be used.
    """
    return AcceleratorMonitor(accelerator, launched)
