"""The interface of a precision; the base class implements full precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state import PartialState

from ..kwargs.base import Handlers
from ..kwargs.handlers import AutocastKwargs


@dataclass(eq=False)
class Precision:
    """Models compute in the precision of their own weights.

    Args:
        state: rank, world and device.
        handlers: the settings given to the Accelerator.

    Attributes:
        scaler: the loss scaler, or None.
    """

    state: PartialState
    handlers: Handlers
    scaler: torch.amp.GradScaler | None = field(default=None, init=False)

    @cached_property
    def settings(self) -> AutocastKwargs:
        """How autocast runs."""
        return self.handlers.get(AutocastKwargs)

    @property
    def is_native(self) -> bool:
        """True if torch's own autocast does the work."""
        return False

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Return a context manager that computes in this precision.

        Args:
            settings: override those of the Accelerator.
        """
        return nullcontext()

    def wrap_forward(self, model: nn.Module) -> None:
        """Make the forward of a model, wrapped or not, compute in this precision."""

    def prepare_together(self, objects: list[Any], preparation: Any) -> list[Any]:
        """Prepare a model together with its optimizer, like the strategy's method of this name, before it."""
        return objects

    def watch(self, optimizer: Optimizer) -> None:
        """Run with each prepared optimizer."""

    def check_uneven_inputs(self) -> None:
        """Raise ConfigurationError if this precision needs all ranks at every step, so none may end early."""
