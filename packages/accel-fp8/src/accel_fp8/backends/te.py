"""Transformer Engine: NVIDIA's layers for 8-bit training. https://docs.nvidia.com/deeplearning/transformer-engine/"""

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


def _te() -> Any:
    return require("transformer_engine.pytorch", purpose="the FP8 back end 'te'", install="accel-fp8[te]")


def _te_recipes() -> Any:
    return require("transformer_engine.common.recipe", purpose="the FP8 back end 'te'", install="accel-fp8[te]")


class TransformerEngineBackend(Backend):
    """Linear layers and layer norms become those of Transformer Engine, and run in its autocast."""

    name: ClassVar[str] = "te"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._refuse_pure_e5m2()
        _te()
        self.te_recipe = build_recipe(recipe)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type == "cpu":
            return "Transformer Engine computes on NVIDIA GPUs only"
        if not is_transformer_engine_available():
            return None  # building the back end says how to install it
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
    """What Transformer Engine itself says against FP8 on this machine; None where nothing."""
    te = _te()
    if hasattr(te, "is_fp8_available"):
        supported, reason = te.is_fp8_available(return_reason=True)
    else:
        supported, reason = te.fp8.check_fp8_support()
    return None if supported else str(reason)


def te_autocast(enabled: bool, recipe: Any, process_group: Any = None) -> AbstractContextManager[Any]:
    """Transformer Engine's autocast, by the name that the installed version gives it.

    Args:
        enabled: whether its layers compute in 8 bits.
        recipe: one of ``transformer_engine.common.recipe``.
        process_group: the processes that share scales.
    """
    te = _te()
    if hasattr(te, "fp8_autocast"):
        block: AbstractContextManager[Any] = te.fp8_autocast(
            enabled=enabled, fp8_recipe=recipe, fp8_group=process_group
        )
        return block
    renamed: AbstractContextManager[Any] = te.autocast(
        enabled=enabled, recipe=recipe, amax_reduction_group=process_group
    )
    return renamed


def build_recipe(recipe: FP8Recipe) -> Any:
    """The recipe in Transformer Engine's own terms.

    Args:
        recipe: ours.

    Returns:
        A ``DelayedScaling``, or a ``MXFP8BlockScaling`` with ``use_mxfp8_block_scaling``.

    Raises:
        ConfigurationError: the installed version does not have what the recipe asks for.
        MissingDependencyError: Transformer Engine is not installed.
    """
    recipes = _te_recipes()
    fp8_format = getattr(recipes.Format, recipe.fp8_format)
    if recipe.use_mxfp8_block_scaling:
        if not hasattr(recipes, "MXFP8BlockScaling"):
            raise ConfigurationError("use_mxfp8_block_scaling=True needs Transformer Engine 2.0 or newer.")
        return recipes.MXFP8BlockScaling(margin=recipe.margin, fp8_format=fp8_format)
    wanted = {
        "margin": recipe.margin,
        "interval": recipe.interval,
        "fp8_format": fp8_format,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": recipe.amax_compute_algo,
        "override_linear_precision": recipe.override_linear_precision,
    }
    accepted = inspect.signature(recipes.DelayedScaling).parameters
    for name, harmless in (("interval", 1), ("override_linear_precision", (False, False, False))):
        if name not in accepted and wanted.pop(name) != harmless:
            raise ConfigurationError(
                f"{name}={getattr(recipe, name)!r}: the installed Transformer Engine has no such setting any more. "
                "Leave it out, or take "
                "fp8_backend='native', which has it."
            )
    return recipes.DelayedScaling(**wanted)


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace the linear layers and layer norms of a model by those of Transformer Engine, or the other way round, in
    place.

    The new layers have the parameters of the old ones: the same objects, so an optimizer that holds them goes on
    training them. Linear layers with a dimension that is no multiple of 16 stay, because FP8 products need one; layer
    norms without weights, or over several dimensions, stay as well.

    Args:
        model: the model.
        to_transformer_engine: False goes back to torch's layers.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.

    Raises:
        MissingDependencyError: Transformer Engine is not installed.
    """
    te = _te()
    makers: dict[type, Callable[[Any, Any], nn.Module | None]] = {}
    if _convert_linear:
        makers[nn.Linear if to_transformer_engine else te.Linear] = (
            _te_linear if to_transformer_engine else _torch_linear
        )
    if _convert_ln:
        makers[nn.LayerNorm if to_transformer_engine else te.LayerNorm] = (
            _te_norm if to_transformer_engine else _torch_norm
        )
    _replace_layers(te, model, makers, {})


def _replace_layers(te: Any, model: nn.Module, makers: dict[type, Any], made: dict[int, nn.Module]) -> None:
    for name, child in model._modules.items():
        if child is None:
            continue
        maker = makers.get(type(child))
        if maker is None:
            _replace_layers(te, child, makers, made)
            continue
        if id(child) not in made:  # a layer that is used in two places stays one layer
            made[id(child)] = maker(te, child) or child
        model._modules[name] = made[id(child)]


def _take_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Give a new layer the parameters and the mode of the one it replaces."""
    new._parameters["weight"] = old._parameters["weight"]
    if old._parameters.get("bias") is not None:
        new._parameters["bias"] = old._parameters["bias"]
    return new.train(old.training)


def _te_linear(te: Any, layer: nn.Linear) -> nn.Module | None:
    if not has_fitting_dimensions(layer):
        return None
    has_bias = layer.bias is not None
    weight = layer.weight
    new = te.Linear(
        layer.in_features, layer.out_features, bias=has_bias, params_dtype=weight.dtype, device=weight.device
    )
    return _take_over(layer, new)


def _te_norm(te: Any, layer: nn.LayerNorm) -> nn.Module | None:
    if (
        layer._parameters.get("weight") is None
        or layer._parameters.get("bias") is None
        or len(layer.normalized_shape) != 1
    ):
        return None
    new = te.LayerNorm(
        layer.normalized_shape[0], eps=layer.eps, params_dtype=layer.weight.dtype, device=layer.weight.device
    )
    return _take_over(layer, new)


def _torch_linear(te: Any, layer: Any) -> nn.Module:
    has_bias = isinstance(layer._parameters.get("bias"), nn.Parameter)
    return _take_over(layer, nn.Linear(layer.in_features, layer.out_features, bias=has_bias, device="meta"))


def _torch_norm(te: Any, layer: Any) -> nn.Module:
    return _take_over(layer, nn.LayerNorm(tuple(layer.weight.shape), eps=layer.eps, device="meta"))


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer of a model is one of Transformer Engine's.

    Raises:
        MissingDependencyError: Transformer Engine is not installed.
    """
    te = _te()
    kinds = tuple(
        kind
        for kind in (getattr(te, name, None) for name in ("Linear", "LayerNorm", "TransformerLayer"))
        if kind is not None
    )
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that runs in Transformer Engine's autocast, in 8 bits while the model trains.

    Args:
        model_forward: the bound forward of a model.
        fp8_recipe: one of ``transformer_engine.common.recipe``.
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
    """Convert a model to Transformer Engine's layers and let its forward run in its autocast, in place.

    Args:
        model: the model.
        fp8_recipe_handler: a ``TERecipeKwargs``, an ``FP8RecipeKwargs``, an :class:`FP8Recipe`, or None for the
            launcher's settings.

    Returns:
        The given model.

    Raises:
        ConfigurationError: the recipe asks for what the installed version does not have.
        MissingDependencyError: Transformer Engine is not installed.
    """
    recipe = _recipe_of(fp8_recipe_handler)
    if not has_transformer_engine_layers(model):
        with torch.no_grad():
            convert_model(model)
    model.forward = contextual_fp8_autocast(model.forward, build_recipe(recipe), recipe.use_autocast_during_eval)
    return model


def _recipe_of(handler: Any) -> FP8Recipe:
    if isinstance(handler, FP8Recipe):
        return handler
    settings = handler.recipe_settings() if hasattr(handler, "recipe_settings") else {}
    return FP8Recipe.from_environment(**settings)
