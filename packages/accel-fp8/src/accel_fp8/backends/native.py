"""Our own back end: torch's scaled matrix product, and nothing else to install."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from ..delayed_scaling import AmaxGroup, ScaleUpdate, synchronize
from ..filters import layer_filter, linear_layers
from ..linear import NativeLinear, convert_layer, restore_layer
from ..matmul import computes_in_8_bits
from ..recipe import FP8Recipe
from .base import Backend

_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


class NativeBackend(Backend):
    """Linear layers compute with ``torch._scaled_mm``, by the hardware where it can, and elsewhere with the same
    numbers.
    """

    name: ClassVar[str] = "native"

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._refuse_pure_e5m2()

    @classmethod
    def merit(cls, device: torch.device) -> str | None:
        if computes_in_8_bits(device):
            return f"torch multiplies in 8 bits on {device.type}, and it needs no other package"
        return (
            f"torch does not multiply in 8 bits on {device.type} here: the numbers are those of 8 bits, the speed "
            "is not"
        )

    def convert(self, model: nn.Module, process_group: Any = None, sharded: bool = False) -> nn.Module:
        return convert_to_native(model, self.recipe, process_group)

    def synchronize(self, model: nn.Module) -> None:
        synchronize(model)


def convert_to_native(
    model: nn.Module, recipe: FP8Recipe | None = None, process_group: Any = None, reduce_amax: bool = True
) -> nn.Module:
    """Let the linear layers of a model compute in 8 bits with torch's own product, in place.

    The layers keep their weights (the same parameters, in the precision they have), names and hooks. With delayed
    scaling they get buffers, which are in the state dict. Convert before wrapping (DDP, FSDP) and before compiling.

    Args:
        model: the whole model.
        recipe: what is computed, and how.
        process_group: the data-parallel processes, over which largest values are taken; the default group where there
            is one.
        reduce_amax: False keeps the scales of every process to itself.

    Returns:
        The given model.

    Raises:
        ConfigurationError: a parametrized layer, or a model that is converted with other settings already.
    """
    recipe = recipe or FP8Recipe(backend="native")
    accepts = layer_filter(model, recipe.module_filter_func)
    # The filter has done its work then, and is often a function that cannot be pickled with the model.
    recipe = replace(recipe, module_filter_func=None)
    chosen = [layer for name, layer in linear_layers(model) if type(layer) is nn.Linear and accepts(layer, name)]
    known = [layer for _, layer in linear_layers(model) if isinstance(layer, NativeLinear)]
    if known:
        _refuse_other_recipe(known, recipe)
        return model
    converted = [convert_layer(layer, recipe) for layer in chosen]
    if converted and recipe.scaling == "delayed":
        model.register_forward_pre_hook(ScaleUpdate(converted, recipe, AmaxGroup(process_group, reduce_amax)))
        _hide_from_ddp(model)
    return model


def restore_native(model: nn.Module) -> nn.Module:
    """Make a model that :func:`convert_to_native` converted compute as before, in place. Its weights stay as they are."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, ScaleUpdate)]:
            del module._forward_pre_hooks[key]
            _show_to_ddp(module)
        if isinstance(module, NativeLinear):
            restore_layer(module)
    return model


def has_native_layers(model: nn.Module) -> bool:
    """Whether a layer of a model computes in 8 bits with torch's own product."""
    return any(isinstance(module, NativeLinear) for module in model.modules())


def _refuse_other_recipe(known: Iterable[NativeLinear], recipe: FP8Recipe) -> None:
    others = [layer.recipe for layer in known if layer.recipe != recipe]
    if others:
        raise ConfigurationError(
            f"the model is converted already, with {others[0]}. Call restore_native(model) before converting it with "
            f"{recipe}."
        )


def _buffer_names(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_buffers() if name.rpartition(".")[2].startswith("fp8_")]
    # The second is how they are called inside of torch.compile(model).
    return [*names, *(f"_orig_mod.{name}" for name in names)]


def _hide_from_ddp(model: nn.Module) -> None:
    """Keep DDP from sending rank 0's histories to all ranks before each forward pass: that would lose what the others
    saw.
    """
    ignored = list(getattr(model, _DDP_IGNORES, []))
    setattr(model, _DDP_IGNORES, [*ignored, *_buffer_names(model)])


def _show_to_ddp(model: nn.Module) -> None:
    hidden = set(_buffer_names(model))
    setattr(model, _DDP_IGNORES, [name for name in getattr(model, _DDP_IGNORES, []) if name not in hidden])
