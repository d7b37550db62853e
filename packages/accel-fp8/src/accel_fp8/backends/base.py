"""What a back end does for a model. The base class computes in 16 bits, and so is a back end that converts nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state import devices
from accel_state.errors import ConfigurationError

from ..recipe import FP8Recipe


class Backend:
    """Converts models, and opens the block that their forward passes run in.

    Args:
        recipe: what is computed in 8 bits, and how.
        device: where models compute.

    Raises:
        ConfigurationError: the recipe asks for what the back end cannot do.
        MissingDependencyError: a package is not installed.
    """

    name: ClassVar[str]
    """What it is registered under."""

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why the back end cannot compute on a device with what is installed; None where it can."""
        return None

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        """Why it should be chosen on a device where nothing was asked for; None where it should not."""
        return None

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        """Let layers of a model compute in 8 bits, in place.

        Args:
            model: the whole model, not yet wrapped or compiled.
            process_group: the data-parallel processes, where they are not all.
            sharded: whether FSDP 2 will shard it.

        Returns:
            The given model.

        Raises:
            ConfigurationError: the model cannot be converted.
        """
        return model

    def initialize(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Prepare a model and its optimizer together; most back ends leave the optimizer alone.

        Args:
            model: on its device, not yet wrapped.
            optimizer: over its parameters.
        """
        return model, optimizer

    @property
    def takes_optimizer(self) -> bool:
        """Whether :meth:`initialize` does something, and so must be called."""
        return False

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """A block whose operations outside of converted layers compute in bfloat16, where the device has it.

        Args:
            enabled: False computes in full precision.
        """
        if not devices.get(self.device.type).supports_autocast(torch.bfloat16):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def forward_context(self, training: bool) -> AbstractContextManager[Any]:
        """The block of one forward pass, inside of :meth:`autocast`.

        Args:
            training: whether the model is in training mode.
        """
        return nullcontext()

    def synchronize(self, model: nn.Module) -> None:
        """Make state of a model the same on all processes, before one of them saves it for all. Every process calls it."""

    def _refuse_pure_e5m2(self) -> None:
        if self.recipe.fp8_format == "E5M2":
            raise ConfigurationError(
                f"fp8_format='E5M2' cannot be trained with: no back end, and {self.name} neither, multiplies two "
                "matrices of E5M2. "
                "Allowed: HYBRID, E4M3."
            )
