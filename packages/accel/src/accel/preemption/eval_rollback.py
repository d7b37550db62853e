"""The training as it was at the end of a loop, to go back to when the evaluation that follows is interrupted.

A script cannot be entered in the middle of an evaluation. What it can do is to enter the epoch at the end of its
training loop, and run all that comes after it again. For that, everything has to be as it was there. An evaluation
leaves weights alone, so only small things are remembered: what the code between the two loops may change, as a
scheduler that steps once an epoch does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import contents

if TYPE_CHECKING:
    from ..accelerator import Accelerator


class LoopEnd:
    """Remembers everything but weights and the optimizers' state, at the moment when a training loop asks for a batch
    beyond its last.

    Args:
        accelerator: whose training it is.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        prepared = accelerator.prepared
        self._steps = _steps_taken(accelerator)
        self._generators = contents.capture(accelerator.process_state.device_backend)
        self._settings = [[_settings(group) for group in optimizer.param_groups] for optimizer in prepared.optimizers]
        holders = [*prepared.dataloaders, *prepared.schedulers, *accelerator._custom_objects]
        self._states = [
            (holder, copy.deepcopy(holder.state_dict())) for holder in holders if hasattr(holder, "load_state_dict")
        ]

    def holds(self, accelerator: Accelerator) -> bool:
        """Whether no optimizer has stepped since."""
        return self._steps == _steps_taken(accelerator)

    def put_back(self, accelerator: Accelerator) -> None:
        """Make everything what it was."""
        for holder, state in self._states:
            holder.load_state_dict(state)
        for optimizer, groups in zip(accelerator.prepared.optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                _restore_settings(group, settings)
        contents.restore(self._generators, accelerator.process_state.device_backend, Path("memory"))


def _steps_taken(accelerator: Accelerator) -> list[int]:
    return [optimizer.steps_taken for optimizer in accelerator.prepared.optimizers]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _restore_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
            # Learning rates of capturable optimizers are read where they lie.
            group[name].copy_(value)
        else:
            group[name] = value
