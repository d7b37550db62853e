"""Interface of FP8 back ends. The base class converts nothing and computes in 16 bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state import devices
from accel_state.errors import ConfigurationError

from ..recipe import FP8Recipe


class Backend:
    """Converts models, and provides the context of their forward passes.

    Args:
        recipe: FP8 settings.
        device: device that models compute on.

    Attributes:
        name: name in the registry.

    Raises:
        ConfigurationError: the back end does not support the recipe.
        MissingDependencyError: a package is not installed.
    """

    name: ClassVar[str]

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why the back end cannot compute on a device with the installed packages; None if it can."""
        return None

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        """Why to select the back end by default on a device; None if it should not be."""
        return None

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        """Convert layers of a model, in place.

        Args:
            model: the whole model, not yet wrapped or compiled.
            process_group: the data-parallel process group; None means all processes.
            sharded: whether FSDP 2 will shard the model.

        Returns:
            The given model.

        Raises:
            ConfigurationError: the model cannot be converted.
        """
        return model

    def initialize(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Prepare a model, on its device and not yet wrapped, together with its optimizer."""
        return model, optimizer

    @property
    def takes_optimizer(self) -> bool:
        """True if :meth:`initialize` must be called."""
        return False

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Context in which operations outside converted layers compute in bfloat16, if the device supports it."""
        if not devices.get(self.device.type).supports_autocast(torch.bfloat16):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def forward_context(self, training: bool) -> AbstractContextManager[Any]:
        """Context of one forward pass, inside :meth:`autocast`; ``training`` is the model's mode."""
        return nullcontext()

    def synchronize(self, model: nn.Module) -> None:
        """Make FP8 state equal on all processes, before one of them saves it. Called on every process."""

    def _refuse_pure_e5m2(self) -> None:
        if self.recipe.fp8_format == "E5M2":
            raise ConfigurationError(
                f"fp8_format='E5M2' cannot be trained with: the FP8 back end {self.name!r} does not multiply two E5M2 "
                "matrices. Allowed: HYBRID, E4M3."
            )
