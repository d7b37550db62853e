"""torchao: linear layers with dynamic scales, designed for torch.compile. https://github.com/pytorch/ao"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from accel_state.errors import MissingDependencyError, require
from accel_state.imports import is_torchao_available

from ..filters import layer_filter
from ..matmul import computes_in_8_bits
from ..recipe import FP8Recipe, LayerFilter
from .base import Backend

F = TypeVar("F", bound=Callable[..., Any])


def _torchao() -> Any:
    return require("torchao.float8", purpose="the FP8 back end 'ao'", install="accel-fp8[ao]")


def torchao_required(func: F) -> F:
    """Decorate a function to raise MissingDependencyError (an ImportError) if torchao is not installed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise MissingDependencyError(
                f"{func.__name__} needs torchao 0.6.1 or newer. Install it with: pip install 'accel-fp8[ao]'"
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


class TorchAOBackend(Backend):
    """Converts linear layers to ``torchao.float8.Float8Linear``, with the same parameters."""

    name: ClassVar[str] = "ao"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        _torchao()

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        # On a CPU it has no advantage over the native back end, which supports delayed scaling.
        if device.type == "cpu" or not is_torchao_available() or not computes_in_8_bits(device):
            return None
        return f"torchao is installed, and {device.type} multiplies in 8 bits"

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        return convert_model_to_fp8_ao(model, self._config(sharded), self.recipe.module_filter_func)

    def _config(self, sharded: bool) -> Any:
        """Return the recipe as a Float8LinearConfig."""
        recipe = self.recipe
        if recipe.config is not None:
            return recipe.config
        config = _torchao().Float8LinearConfig.from_recipe_name(recipe.ao_recipe)
        # The all-gather in 8 bits replaces parameters, and supports tensorwise scales only.
        gather = recipe.enable_fsdp_float8_all_gather and sharded and recipe.ao_recipe == "tensorwise"
        return replace(config, pad_inner_dim=recipe.pad_inner_dim, enable_fsdp_float8_all_gather=gather)


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: LayerFilter | None = None
) -> nn.Module:
    """Convert the linear layers of a model to torchao, in place.

    Args:
        model: the whole model.
        config: a ``torchao.float8.Float8LinearConfig``; defaults to that of torchao.
        module_filter_func: called with a layer and its name; False keeps it in high precision. The default excludes the
            first and the last linear layer. Layers with a dimension that is not a multiple of 16 are always excluded.

    Returns:
        The given model.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    accepts = layer_filter(model, module_filter_func)
    if isinstance(model, nn.Linear):
        return model  # it is both the first and the last layer
    torchao = _torchao()
    torchao.convert_to_float8_training(
        model,
        config=config if config is not None else torchao.Float8LinearConfig(),
        module_filter_fn=lambda layer, name: type(layer) is nn.Linear and accepts(layer, name),
    )
    return model


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Return True if a model has layers converted to torchao.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    layer = require("torchao.float8.float8_linear", purpose="has_ao_layers", install="accel-fp8[ao]").Float8Linear
    return any(isinstance(module, layer) for module in model.modules())
