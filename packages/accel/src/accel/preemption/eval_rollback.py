"""A snapshot of the training at the end of a loop, to return to when the evaluation after it is interrupted.

A script cannot be resumed in the middle of an evaluation. It can be resumed at the end of the training loop before it,
and then runs everything after that loop again. For that, everything has to be as it was there. An evaluation does not
change weights, so only small things are kept: those that the code between the two loops may change, such as a scheduler
that steps once per epoch.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.rng_state import capture_rng, restoring_rng
from accel_state.devices.base import Device

from ..setup.prepare import Preparation


class LoopEnd:
    """Everything but weights and optimizer state, when a training loop asks for a batch beyond its last."""

    def __init__(self, prepared: Preparation, registered: list[Any], device: Device) -> None:
        self._steps = [optimizer.steps_taken for optimizer in prepared.optimizers]
        self._device = device
        self._generators = capture_rng(device)
        self._settings = []
        for optimizer in prepared.optimizers:
            groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
            self._settings.append(copy.deepcopy(groups))
        self._states = []
        for obj in [*prepared.dataloaders, *prepared.schedulers, *registered]:
            if hasattr(obj, "load_state_dict"):
                self._states.append((obj, copy.deepcopy(obj.state_dict())))

    def is_current(self, prepared: Preparation) -> bool:
        """Return True if no optimizer has stepped since."""
        return self._steps == [optimizer.steps_taken for optimizer in prepared.optimizers]

    def restore(self, prepared: Preparation) -> None:
        for obj, state in self._states:
            obj.load_state_dict(state)
        for optimizer, groups in zip(prepared.optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                        # Captured graphs read the learning rate from this tensor.
                        group[name].copy_(value)
                    else:
                        group[name] = value
        restoring_rng(self._generators, self._device, Path("memory"))()
