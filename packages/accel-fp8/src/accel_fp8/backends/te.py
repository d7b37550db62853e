"""Transformer Engine: NVIDIA's layers for FP8 training. https://docs.nvidia.com/deeplearning/transformer-engine/"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.errors import ConfigurationError, require
from accel_state.imports import is_transformer_engine_available

from ..filters import has_fitting_dimensions
from ..recipe import FP8Recipe
from .base import Backend


def _te(module: str = "pytorch") -> Any:
    return require(f"transformer_engine.{module}", purpose="the FP8 back end 'te'", install="accel-fp8[te]")


class TransformerEngineBackend(Backend):
    """Replaces linear layers and layer norms by those of Transformer Engine, and runs them in its autocast."""

    name: ClassVar[str] = "te"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._refuse_pure_e5m2()
        _te()
        self.te_recipe: Any = build_recipe(recipe)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "Transformer Engine computes on NVIDIA GPUs only"
        if not is_transformer_engine_available():
            return None  # the constructor raises MissingDependencyError
        return _why_without_fp8()

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        return "Transformer Engine is installed, and this GPU has FP8" if is_transformer_engine_available() else None

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        self._process_group = process_group
        if not has_transformer_engine_layers(model):
            with torch.no_grad():
                convert_model(model)
        return model

    def forward_context(self, training: bool) -> AbstractContextManager[Any]:
        enabled = training or self.recipe.use_autocast_during_eval
        return te_autocast(enabled, self.te_recipe, getattr(self, "_process_group", None))


def _why_without_fp8() -> str | None:
    """Return Transformer Engine's reason for not supporting FP8 on this GPU, or None."""
    te = _te()
    if hasattr(te, "is_fp8_available"):
        supported, reason = te.is_fp8_available(return_reason=True)
    else:
        supported, reason = te.fp8.check_fp8_support()
    return None if supported else str(reason)


def te_autocast(enabled: bool, recipe: Any, process_group: Any = None) -> AbstractContextManager[Any]:
    """Return Transformer Engine's autocast, whose name depends on the version."""
    te = _te()
    if hasattr(te, "fp8_autocast"):
        context = te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=process_group)
    else:
        context = te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=process_group)
    return context


def build_recipe(recipe: FP8Recipe) -> Any:
    """Convert a recipe to Transformer Engine's; raises ConfigurationError for settings that it does not support."""
    recipes = _te("common.recipe")
    fp8_format = getattr(recipes.Format, recipe.fp8_format)
    if recipe.use_mxfp8_block_scaling:
        if not hasattr(recipes, "MXFP8BlockScaling"):
            raise ConfigurationError("use_mxfp8_block_scaling=True needs Transformer Engine 2.0 or newer.")
        return recipes.MXFP8BlockScaling(margin=recipe.margin, fp8_format=fp8_format)
    settings = {
        "margin": recipe.margin,
        "interval": recipe.interval,
        "fp8_format": fp8_format,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
        "override_linear_precision": recipe.override_linear_precision,
    }
    accepted = inspect.signature(recipes.DelayedScaling).parameters
    for name, default in (("interval", 1), ("override_linear_precision", (False, False, False))):
        if name not in accepted and settings.pop(name) != default:
            raise ConfigurationError(
                f"{name}={getattr(recipe, name)!r} is no longer supported by the installed Transformer Engine. Remove "
                "it, or use fp8_backend='native'."
            )
    return recipes.DelayedScaling(**settings)


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace the linear layers and layer norms of a model by those of Transformer Engine, or vice versa, in place.

    The parameters stay the same objects, so that an optimizer keeps training them. Linear layers with a dimension that
    is not a multiple of 16 stay, because FP8 products need one; so do layer norms without weight or bias, or over
    several dimensions.

    Args:
        model: the model.
        to_transformer_engine: False converts back to torch's layers.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.

    Raises:
        MissingDependencyError: Transformer Engine is not installed.
    """
    te = _te()
    factories: dict[type, Callable[[Any, Any], nn.Module | None]] = {}
    if to_transformer_engine:
        factories = {nn.Linear: _te_linear, nn.LayerNorm: _te_norm}
    else:
        factories = {te.Linear: _torch_linear, te.LayerNorm: _torch_norm}
    enabled = dict(zip(factories, (_convert_linear, _convert_ln), strict=True))
    replacements: dict[int, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if layer is model or not enabled.get(type(layer), False):
            continue
        if id(layer) not in replacements:  # a layer with several names stays one layer
            replacements[id(layer)] = factories[type(layer)](te, layer) or layer
        model.set_submodule(name, replacements[id(layer)])


def _with_parameters_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """Set parameters and mode of a new layer to those of the layer it replaces."""
    new.weight = old.weight
    # Transformer Engine's layers without bias have an empty tensor.
    if isinstance(old.bias, nn.Parameter):
        new.bias = old.bias
    return new.train(old.training)


def _te_linear(te: Any, layer: nn.Linear) -> nn.Module | None:
    if not has_fitting_dimensions(layer):
        return None
    weight, has_bias = layer.weight, layer.bias is not None
    new = te.Linear(
        layer.in_features, layer.out_features, bias=has_bias, params_dtype=weight.dtype, device=weight.device
    )
    return _with_parameters_of(layer, new)


def _te_norm(te: Any, layer: nn.LayerNorm) -> nn.Module | None:
    weight: Any = layer.weight
    if weight is None or layer.bias is None or len(layer.normalized_shape) != 1:
        return None
    new = te.LayerNorm(layer.normalized_shape[0], eps=layer.eps, params_dtype=weight.dtype, device=weight.device)
    return _with_parameters_of(layer, new)


def _torch_linear(te: Any, layer: Any) -> nn.Module:
    has_bias = isinstance(layer.bias, nn.Parameter)
    return _with_parameters_of(layer, nn.Linear(layer.in_features, layer.out_features, bias=has_bias, device="meta"))


def _torch_norm(te: Any, layer: Any) -> nn.Module:
    return _with_parameters_of(layer, nn.LayerNorm(tuple(layer.weight.shape), eps=layer.eps, device="meta"))


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return True if a model has layers of Transformer Engine.

    Raises:
        MissingDependencyError: Transformer Engine is not installed.
    """
    te = _te()
    names = ("Linear", "LayerNorm", "TransformerLayer")
    kinds = tuple(getattr(te, name) for name in names if hasattr(te, name))
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wrap a forward to run in Transformer Engine's autocast.

    Args:
        model_forward: the bound ``forward`` method of a model.
        fp8_recipe: a recipe of ``transformer_engine.common.recipe``.
        use_during_eval: compute in 8 bits in evaluation mode too.
    """
    owner = getattr(model_forward, "__self__", None)

    @functools.wraps(model_forward, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        training = owner.training if isinstance(owner, nn.Module) else True
        with te_autocast(training or use_during_eval, fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Convert a model to Transformer Engine's layers, and wrap its forward in its autocast, in place.

    Args:
        model: the model.
        fp8_recipe_handler: a ``TERecipeKwargs``, ``FP8RecipeKwargs`` or :class:`FP8Recipe`; None means the launcher's
            settings.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the installed version does not support a setting.
        MissingDependencyError: Transformer Engine is not installed.
    """
    recipe = fp8_recipe_handler
    if not isinstance(recipe, FP8Recipe):
        settings = recipe.recipe_settings() if hasattr(recipe, "recipe_settings") else {}
        recipe = FP8Recipe.from_environment(**settings)
    if not has_transformer_engine_layers(model):
        with torch.no_grad():
            convert_model(model)
    model.forward = contextual_fp8_autocast(model.forward, build_recipe(recipe), recipe.use_autocast_during_eval)
    return model
