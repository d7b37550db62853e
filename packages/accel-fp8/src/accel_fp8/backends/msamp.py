"""MS-AMP: gradients, optimizer states and their reduction in 8 bits. https://azure.github.io/MS-AMP/

MS-AMP targets PyTorch 2.1 and has not had a release since 2024. Prefer torchao or the native back end.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.errors import MissingDependencyError
from accel_state.imports import is_msamp_available

from ..recipe import FP8Recipe
from .base import Backend


class MSAMPBackend(Backend):
    """``msamp.initialize`` for a model and its optimizer."""

    name: ClassVar[str] = "msamp"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._msamp()

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return "MS-AMP computes on a GPU only" if device.type == "cpu" else None

    @staticmethod
    def _msamp() -> Any:
        if not is_msamp_available():  # not on PyPI, so the usual message with a pip command would not help
            raise MissingDependencyError(
                "the FP8 back end 'msamp' needs MS-AMP, which must be built from source: "
                "https://azure.github.io/MS-AMP/docs/getting-started/installation. It is no longer maintained; use "
                "fp8_backend='ao' (pip install 'accel-fp8[ao]') or 'native' (no further package) with current PyTorch."
            )
        return importlib.import_module("msamp")

    @property
    def takes_optimizer(self) -> bool:
        return True

    def initialize(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        prepared: tuple[nn.Module, Any] = self._msamp().initialize(model, optimizer, opt_level=self.recipe.opt_level)
        return prepared
