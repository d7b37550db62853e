"""MS-AMP: gradients, optimizer states and their reduction in 8 bits. https://azure.github.io/MS-AMP/

The project has not had a release since 2024 and is made for PyTorch 2.1; torchao and the native back end are the ones
to use on today's PyTorch.
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
    """``msamp.initialize`` over a model and its optimizer."""

    name: ClassVar[str] = "msamp"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._msamp()

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return "MS-AMP computes on a GPU only" if device.type == "cpu" else None

    @staticmethod
    def _msamp() -> Any:
        if not is_msamp_available():  # no pip command gets it, so the usual message would not help
            raise MissingDependencyError(
                "the FP8 back end 'msamp' needs MS-AMP, which is on no package index: its own guide says how to build "
                "it, "
                "https://azure.github.io/MS-AMP/docs/getting-started/installation. It is not maintained any more: "
                "fp8_backend='ao' "
                "(pip install 'accel-fp8[ao]') or 'native' (nothing to install) compute in 8 bits on today's PyTorch."
            )
        return importlib.import_module("msamp")

    @property
    def takes_optimizer(self) -> bool:
        return True

    def initialize(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        prepared_model, prepared_optimizer = self._msamp().initialize(model, optimizer, opt_level=self.recipe.opt_level)
        return prepared_model, prepared_optimizer
